"""`lrl score --join`: scores responses of a live run on this machine, with reward workers of its own."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from lrl.generators.auth import bearer
from lrl.membership.discovery import NotRunning
from lrl.membership.run_file import find_run
from lrl.rewards.host import HostError, RewardHost
from lrl.runtime.cpu_affinity import usable_cores
from lrl.runtime.import_by_name import with_current_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Scores until the run ends, in the foreground.

    Args:
        argv: The words after `lrl score`.

    Returns:
        Exit status: 1 if the rewards do not work here, 2 if the command is wrong or the run does not take this host.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if wrong := _wrong(args):
        parser.error(wrong)
    with_current_folder()  # for the workers, which import the rewards
    try:
        run = find_run(args.join, args.run_cert)
        headers = {"Authorization": bearer(run.token)}
        host = RewardHost(run.location.url, headers, run.location.context(), args.workers, args.number, _say)
        asyncio.run(host.run())
    except (NotRunning, HostError) as error:
        return _error(error, 2)
    except (ValueError, RuntimeError, TimeoutError) as error:
        return _error(error, 1)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(prog="lrl score", description="Score responses of a live run on this machine.")
    runs = "the run: the address that it has printed, or its folder"
    parser.add_argument("--join", metavar="RUN", required=True, help=runs)
    cores = usable_cores()
    parser.add_argument("--workers", metavar="N", type=int, default=cores, help=f"processes that score ({cores})")
    parser.add_argument("--number", metavar="N", type=int, help="the host's number, which a launcher has")
    parser.add_argument("--run_cert", metavar="FILE", help="the run's certificate, PEM, if RUN is its address")
    return parser


def _wrong(args: argparse.Namespace) -> str:
    """Returns the error about the arguments, empty if there is none."""
    if args.workers < 1:
        return f"--workers {args.workers}: it must be at least 1"
    if args.number is not None and args.number < 0:
        return f"--number {args.number}: reward hosts are counted from 0"
    if args.run_cert and "://" not in args.join:
        return f"--run_cert {args.run_cert}: only with the run's address; its folder has the certificate"
    if Path(args.join).is_file():
        return f"--join {args.join} is a file; give the run's folder, where generator-0.log is"
    return ""


def _say(line: str) -> None:
    sys.stdout.write(f"reward host: {line.rstrip('.')}.\n")
    sys.stdout.flush()


def _error(error: Exception, status: int) -> int:
    sys.stderr.write(f"lrl: error: {error}\n")
    return status
