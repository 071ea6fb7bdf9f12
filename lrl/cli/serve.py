"""`lrl serve`: `--talk` prints the shell lines that ask the policy of a live run; the rest is `lrl.membership.join`.

The lines go to the user's terminal and hold the run's token. It reaches curl through a pipe that the shell fills: what
stands on a command line, everybody on the machine can read.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lrl.cli.interrupt import ends_quietly
from lrl.membership.discovery import NotRunning, Running, find_generator

PROMPT = "1+1="
"""Asked when no prompt is given: even a vocabulary of digits has it."""
LONGEST_RESPONSE = 256
LONGEST_WAIT_S = 300

LINES = """\
# The live policy of {run}, at {name}. The token is the run's: who has it can also stop the run.
# Paste the lines, or have them run without a trace in the shell's history: source <(lrl serve --talk {quoted})
export OPENAI_BASE_URL={base}
export OPENAI_API_KEY={token}
{extra}printf 'Authorization: Bearer %s\\n' "$OPENAI_API_KEY" | curl -sS -w '\\n' --noproxy '*' --max-time {limit} \\
  {cacert}-H @- -H 'Content-Type: application/json' "$OPENAI_BASE_URL/{route}" \\
  -d {body}
"""


@ends_quietly
def main(argv: Sequence[str] | None = None) -> int:
    """Print how to ask a generator, or have one join or leave.

    Args:
        argv: The words after `lrl serve`.

    Returns:
        Exit status: 1 if a generator that joins fails, 2 if it is not said what to do, or it cannot be done.
    """
    parser = _make_parser()
    args = parser.parse_args(argv)
    if wrong := _wrong(args):
        parser.error(wrong)
    try:
        return _serve(args)
    except (NotRunning, ValueError) as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 2


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lrl serve", description="Reach into a run that is going on.")
    what = parser.add_mutually_exclusive_group(required=True)
    folder = functools.partial(what.add_argument, metavar="RUN", type=Path)
    folder("--talk", help="print the command that asks its policy; RUN is the run's folder, where generator-0.log is")
    folder("--join", help="start one more generator for it; it stays in the foreground")
    folder("--leave", help="have one of its generators leave")
    parser.add_argument(
        "--generator", metavar="N", type=int, help="which to ask (0), or which leaves (the last that joined)"
    )
    parser.add_argument("prompt", nargs="*", help=f"what to ask ({PROMPT})")
    own = parser.add_argument_group("joining", "all else is as the run has it")
    own.add_argument(
        "--devices", metavar="I,J", type=indices, default=[], help="CUDA indices the generator takes; none on a CPU"
    )
    own.add_argument("--host", help="address it listens on; another machine than the run's must give one")
    own.add_argument("--tls_cert", metavar="FILE", help="its certificate, PEM")
    own.add_argument("--tls_key", metavar="FILE", help="the certificate's key, PEM")
    own.add_argument("--insecure", action="store_true", help="plain HTTP where others can read along")
    return parser


def indices(words: str) -> list[int]:
    """Numbers from 0 up with commas between them; raises ArgumentTypeError for others."""
    if not re.fullmatch(r"\d+(,\d+)*", words):
        raise argparse.ArgumentTypeError(f"{words!r} are no CUDA indices; give numbers with commas, like 0,1")
    return [int(index) for index in words.split(",")]


def _wrong(args: argparse.Namespace) -> str:
    """What was given and cannot count, empty if nothing."""
    what = next(name for name in ("talk", "join", "leave") if getattr(args, name) is not None)
    run = getattr(args, what)
    joining = [f"--{name}" for name in ("devices", "host", "tls_cert", "tls_key", "insecure") if getattr(args, name)]
    if joining and what != "join":
        return f"{', '.join(joining)}: only for --join; --{what} takes the run as it is"
    if args.prompt and what != "talk":
        return f"--{what} asks nothing: leave out {' '.join(args.prompt)!r}, or give --talk"
    if args.generator is not None and what == "join":
        return f"--generator {args.generator}: only for --talk and --leave; the run gives a newcomer its number"
    if args.generator is not None and args.generator < 0:
        return f"--generator {args.generator}: generators are counted from 0"
    if run.is_file():
        return f"--{what} {run} is a file; give the run's folder, where generator-0.log is"
    return ""


def _serve(args: argparse.Namespace) -> int:
    if args.talk is not None:
        sys.stdout.write(lines(args.talk, args.generator or 0, " ".join(args.prompt) or PROMPT))
        return 0
    from lrl.generators.server import ServerError
    from lrl.membership import join

    if args.leave is not None:
        return join.leave(args.leave, args.generator)
    given = {name: getattr(args, name) for name in ("host", "tls_cert", "tls_key", "insecure")}
    try:
        return join.join(
            args.join, join.LocalOverrides(args.devices, {name: value for name, value in given.items() if value})
        )
    except ServerError as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 1


def lines(run: Path, number: int, prompt: str) -> str:
    """The shell lines that ask `prompt`; raises NotRunning if there is nobody to ask."""
    generator = find_generator(run, number)
    certificate = generator.certificate and shlex.quote(generator.certificate)
    route, body = request(generator, prompt)
    return LINES.format(
        run=run,
        quoted=shlex.quote(str(run)),
        name=generator.name,
        base=f"{generator.url}/v1",
        token=generator.token,
        limit=LONGEST_WAIT_S,
        extra=f"# For clients in Python also: export SSL_CERT_FILE={certificate}\n" if certificate else "",
        cacert=f"--cacert {certificate} " if certificate else "",
        route=route,
        body=body,
    )


def request(generator: Running, prompt: str) -> tuple[str, str]:
    """The OpenAI route, and its body as a word for the shell: a chat where there is a template, else the bare prompt.

    The body ends with a cache salt of its own second: without one, vLLM would start a response on the keys and values
    that older weights left for the same prompt.
    """
    model = _get(generator, "/v1/models")["data"][0]
    chat = [{"role": "user", "content": prompt}]
    has_template = generator.ask("POST", "/tokenize", {"model": model["id"], "messages": chat})[0] == 200
    fields = {
        "model": model["id"],
        **({"messages": chat} if has_template else {"prompt": prompt}),
        "max_tokens": max(1, min(LONGEST_RESPONSE, model["max_model_len"] // 2)),
    }
    start, end = f'{json.dumps(fields)[:-1]}, "cache_salt": "', '"}'
    body = f'{shlex.quote(start)}"$(date +%s)"{shlex.quote(end)}'
    return ("chat/completions" if has_template else "completions"), body


def _get(generator: Running, route: str) -> dict:
    status, answer = generator.ask("GET", route)
    if status != 200:
        raise NotRunning(f"{generator.name} at {generator.url} answered {status} on {route}: {answer}")
    return answer
