"""`lrl join`: brings a member to a live run, in the foreground. `lrl leave`: has one leave it.
`lrl prompt`: how a client of OpenAI's interface reaches its policy."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lrl.errors import NotRunning
from lrl.members.registry import Kind
from lrl.system.imports import with_current_folder
from lrl.system.machine import usable_cores

ENDPOINT_OPTIONS = ("host", "tls_cert", "tls_key", "insecure")


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until the member has left, or the run has ended; returns the exit status: 1 if the
    member fails, 2 if the command is wrong or the run does not take the member."""
    parser = make_parser()
    args = parser.parse_args(argv)
    unused = "workers" if Kind(args.kind) is Kind.GENERATOR else "devices"
    if getattr(args, unused):
        parser.error(f"--{unused}: a member of kind {args.kind} has none")
    with_current_folder()  # for workers, which import the rewards or the environment
    from lrl.members.join import join

    endpoint = {name: value for name in ENDPOINT_OPTIONS if (value := getattr(args, name))}
    kind = Kind(args.kind)
    try:
        return join(
            args.run,
            kind,
            number=args.number,
            devices=args.devices,
            workers=0 if kind is Kind.GENERATOR else args.workers or usable_cores(),
            run_cert=args.run_cert,
            **endpoint,
        )
    except (NotRunning, ValueError, RuntimeError) as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 2 if isinstance(error, NotRunning | ValueError) else 1


def leave(argv: Sequence[str]) -> int:
    """Asks the run, and waits for its answer; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lrl leave", description="Have a generator or workers leave a live run."
    )
    add_member(parser, "the member (the last that joined)")
    args = parser.parse_args(argv)
    from lrl.members import join

    return join.leave(args.run, Kind(args.kind), args.number, args.run_cert)


def prompt(argv: Sequence[str]) -> int:
    """Prints the variables for clients; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lrl prompt",
        description="Print where a live policy answers, as variables for OpenAI's clients.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder, on its machine")
    which = "which one answers (%(default)s)"
    parser.add_argument("--generator", metavar="N", type=int, default=0, help=which)
    args = parser.parse_args(argv)
    from lrl.members.find_run import find_generator

    generator = find_generator(args.run, args.generator)
    variables = {
        "OPENAI_BASE_URL": f"{generator.location.url}/v1",
        "OPENAI_API_KEY": generator.token,
    }
    sys.stdout.write("# The token is the run's: its holder can also stop the run.\n")
    if generator.certificate:  # with this variable a shell trusts no other server
        sys.stdout.write(f"# For this one alone: SSL_CERT_FILE={generator.certificate}\n")
    for name, value in variables.items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="lrl join", description="Bring a generator or workers to a live run."
    )
    add_member(parser, "its number, which a launcher has")
    parser.add_argument(
        "--devices", metavar="I,J", type=indices, default=[], help="CUDA indices; none on a CPU"
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=int,
        help=f"processes that score, and as many that play episodes ({usable_cores()})",
    )
    endpoint = parser.add_argument_group("its address", "as in the run, if it is on this machine")
    endpoint.add_argument("--host", help="address it listens on, which the run's machine reaches")
    endpoint.add_argument("--tls_cert", metavar="FILE", help="its certificate, PEM")
    endpoint.add_argument("--tls_key", metavar="FILE", help="the certificate's key, PEM")
    endpoint.add_argument(
        "--insecure", action="store_true", help="plain HTTP, which others can read"
    )
    return parser


def add_member(parser: argparse.ArgumentParser, number: str) -> None:
    """Adds the arguments that name a run and one of its members."""
    parser.add_argument(
        "run", metavar="RUN", help="the run's folder, or the address that it has printed"
    )
    kinds = [str(kind) for kind in Kind]
    parser.add_argument(
        "--kind", choices=kinds, default=Kind.GENERATOR, help="what the member does (%(default)s)"
    )
    parser.add_argument("--number", metavar="N", type=int, help=number)
    parser.add_argument(
        "--run_cert", metavar="FILE", help="the run's certificate, PEM, if RUN is its address"
    )


def indices(words: str) -> list[int]:
    """Parses numbers separated by commas."""
    return [int(index) for index in words.split(",")]
