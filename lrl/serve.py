"""`lrl serve --talk`: the shell lines that ask the policy of a run that is going on.

They go to the user's terminal and hold the run's token. It reaches curl through a pipe that the shell itself fills:
what stands on a command line, everybody on the machine can read.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lrl.generators.running import NotRunning, Running, find_generator

PROMPT = "1+1="
"""Asked when no prompt is given: even a vocabulary of digits has it."""
LONGEST_ANSWER = 256
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


def main(argv: Sequence[str] | None = None) -> int:
    """Print how to ask a generator.

    Args:
        argv: The words after `lrl serve`.

    Returns:
        Exit status: 2 if it is not said what to do, or there is no such generator.
    """
    parser = argparse.ArgumentParser(
        prog="lrl serve", description="Print the command that asks the policy of a run that is going on."
    )
    parser.add_argument("--talk", metavar="RUN", type=Path, help="the run's folder, where generator-0.log is")
    parser.add_argument("--generator", metavar="N", type=int, default=0, help="which of its generators to ask (0)")
    parser.add_argument("prompt", nargs="*", help=f"what to ask ({PROMPT})")
    args = parser.parse_args(argv)
    if args.talk is None:
        parser.error("say what to do: --talk RUN prints the command that asks the policy of a run that is going on")
    try:
        sys.stdout.write(lines(args.talk, args.generator, " ".join(args.prompt) or PROMPT))
    except NotRunning as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 2
    return 0


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

    The body ends with a cache salt of its own second: without one, vLLM would start an answer on the keys and values
    that older weights left for the same prompt.
    """
    model = _get(generator, "/v1/models")["data"][0]
    chat = [{"role": "user", "content": prompt}]
    has_template = generator.ask("POST", "/tokenize", {"model": model["id"], "messages": chat})[0] == 200
    fields = {
        "model": model["id"],
        **({"messages": chat} if has_template else {"prompt": prompt}),
        "max_tokens": max(1, min(LONGEST_ANSWER, model["max_model_len"] // 2)),
    }
    start, end = f'{json.dumps(fields)[:-1]}, "cache_salt": "', '"}'
    body = f'{shlex.quote(start)}"$(date +%s)"{shlex.quote(end)}'
    return ("chat/completions" if has_template else "completions"), body


def _get(generator: Running, route: str) -> dict:
    status, answer = generator.ask("GET", route)
    if status != 200:
        raise NotRunning(f"{generator.name} at {generator.url} answered {status} on {route}: {answer}")
    return answer
