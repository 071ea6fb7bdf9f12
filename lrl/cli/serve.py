"""`lrl serve`: `--chat` prints shell lines that prompt the policy of a live run; the rest is `lrl.membership.join`.

The lines hold the run's token. It reaches curl through a pipe that the shell fills, because every user of the machine
can read a command line.
"""

import argparse
import functools
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lrl.membership.discovery import NotRunning, Running, find_generator
from lrl.rollouts.chat_template import with_beginning

PROMPT = "1+1="
"""Prompt if none is given; even a vocabulary of digits has it."""
LONGEST_RESPONSE = 256
WAIT_S = 300
"""Longest time of curl for a response."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints how to prompt a generator, or makes one join or leave.

    Args:
        argv: The words after `lrl serve`.

    Returns:
        Exit status: 1 if a joining generator fails, 2 if the command is wrong or cannot be done.
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
    parser = argparse.ArgumentParser(prog="lrl serve", description="Reach into a live run.")
    what = parser.add_mutually_exclusive_group(required=True)
    run = functools.partial(what.add_argument, metavar="RUN")
    run("--chat", help="print the command that prompts its policy; RUN is the run's folder, with generator-0.log")
    run("--join", help="start one more generator for it, in the foreground; RUN may be the address that it has printed")
    run("--leave", help="make one of its generators leave; RUN may be its address, too")
    numbers = "to prompt (0), to leave (the last that joined), or its number, which a launcher has"
    parser.add_argument("--generator", metavar="N", type=int, help=numbers)
    parser.add_argument("prompt", nargs="*", help=f"the prompt ({PROMPT})")
    own = parser.add_argument_group("joining", "all else is as in the run")
    own.add_argument("--devices", metavar="I,J", type=indices, default=[], help="its CUDA indices; none on a CPU")
    own.add_argument("--host", help="address it listens on; required on another machine than the run's")
    own.add_argument("--tls_cert", metavar="FILE", help="its certificate, PEM")
    own.add_argument("--tls_key", metavar="FILE", help="the certificate's key, PEM")
    own.add_argument("--insecure", action="store_true", help="plain HTTP, which others can read")
    own.add_argument("--run_cert", metavar="FILE", help="the run's certificate, PEM, if RUN is its address")
    return parser


def indices(words: str) -> list[int]:
    """Returns numbers from 0 up that commas separate; raises ArgumentTypeError for other words."""
    if not re.fullmatch(r"\d+(,\d+)*", words):
        raise argparse.ArgumentTypeError(f"{words!r} are no CUDA indices; give numbers with commas, like 0,1")
    return [int(index) for index in words.split(",")]


def _wrong(args: argparse.Namespace) -> str:
    """Returns the error about arguments that exclude one another, empty if there is none."""
    what = next(name for name in ("chat", "join", "leave") if getattr(args, name) is not None)
    run = getattr(args, what)
    only_joining = ("devices", "host", "tls_cert", "tls_key", "insecure", "run_cert")
    joining = [f"--{name}" for name in only_joining if getattr(args, name)]
    if joining and what != "join":
        return f"{', '.join(joining)}: only for --join; --{what} takes the run as it is"
    if args.prompt and what != "chat":
        return f"--{what} asks nothing: leave out {' '.join(args.prompt)!r}, or give --chat"
    if args.generator is not None and args.generator < 0:
        return f"--generator {args.generator}: generators are counted from 0"
    if what == "chat" and "://" in run:
        return f"--chat {run} is an address; give the run's folder, on its machine"
    if args.run_cert and "://" not in run:
        return f"--run_cert {args.run_cert}: only with the run's address; its folder has the certificate"
    if Path(run).is_file():
        return f"--{what} {run} is a file; give the run's folder, where generator-0.log is"
    return ""


def _serve(args: argparse.Namespace) -> int:
    if args.chat is not None:
        sys.stdout.write(lines(Path(args.chat), args.generator or 0, " ".join(args.prompt) or PROMPT))
        return 0
    from lrl.generators.server import ServerError
    from lrl.membership import join

    if args.leave is not None:
        return join.leave(args.leave, args.generator)
    given = {name: value for name in ("host", "tls_cert", "tls_key", "insecure") if (value := getattr(args, name))}
    try:
        return join.join(args.join, join.LocalOverrides(args.devices, given, args.run_cert, args.generator))
    except ServerError as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 1


def lines(run: Path, number: int, prompt: str) -> str:
    """Returns the shell lines that send `prompt`; raises NotRunning if no such generator runs."""
    generator = find_generator(run, number)
    certificate = generator.certificate and shlex.quote(generator.certificate)
    extra = f"# For clients in Python also: export SSL_CERT_FILE={certificate}\n" if certificate else ""
    cacert = f"--cacert {certificate} " if certificate else ""
    route, body = request(generator, prompt)
    return f"""\
# The live policy of {run}, at {generator.name}. The token is the run's: its holder can also stop the run.
# Paste the lines, or run them without a trace in the history: source <(lrl serve --chat {shlex.quote(str(run))})
export OPENAI_BASE_URL={generator.url}/v1
export OPENAI_API_KEY={generator.token}
{extra}printf 'Authorization: Bearer %s\\n' "$OPENAI_API_KEY" | curl -sS -w '\\n' --noproxy '*' --max-time {WAIT_S} \\
  {cacert}-H @- -H 'Content-Type: application/json' "$OPENAI_BASE_URL/{route}" \\
  -d {body}
"""


def request(generator: Running, prompt: str) -> tuple[str, str]:
    """Returns the OpenAI route, and its body as a shell word: a chat if there is a template, else the bare prompt.

    Raises:
        NotRunning: The generator does not list its model.
    """
    status, found = generator.ask("GET", "/v1/models")
    if status != 200:
        raise NotRunning(f"{generator.name} at {generator.url} responded {status} on /v1/models: {found}")
    model = found["data"][0]
    chat = [{"role": "user", "content": prompt}]
    has_template = generator.ask("POST", "/tokenize", {"model": model["id"], "messages": chat})[0] == 200
    fields = {
        "model": model["id"],
        **({"messages": chat} if has_template else {"prompt": plain_prompt(generator, model["id"], prompt)}),
        "max_tokens": max(1, min(LONGEST_RESPONSE, model["max_model_len"] // 2)),
    }
    # Without a salt of the current second, vLLM would reuse keys and values of older weights for the same prompt.
    start, end = f'{json.dumps(fields)[:-1]}, "cache_salt": "', '"}'
    body = f'{shlex.quote(start)}"$(date +%s)"{shlex.quote(end)}'
    return ("chat/completions" if has_template else "completions"), body


def plain_prompt(generator: Running, model: str, prompt: str) -> str | list[int]:
    """Returns a prompt without a chat template as it is typed, or as the tokens of training.

    vLLM would add all special tokens of the tokenizer, its end of a text too.

    Raises:
        NotRunning: The generator does not tokenise it.
    """
    tokens: list[list[int]] = []
    for special in (True, False):
        body = {"model": model, "prompt": prompt, "add_special_tokens": special}
        status, found = generator.ask("POST", "/tokenize", body)
        if status != 200:
            raise NotRunning(f"{generator.name} at {generator.url} responded {status} on /tokenize: {found}")
        tokens.append(found["tokens"])
    added, alone = tokens
    trained = with_beginning(added, alone)
    return prompt if trained == added else trained
