"""`lrl prompt`: prints shell lines that prompt the policy of a live run.

The lines hold the run's token. It reaches curl through a pipe that the shell fills, because every
user of the machine can read a command line.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrl.errors import NotRunning
from lrl.members.run_file import Running, find_generator

PROMPT = "1+1="
"""Prompt if none is given; even a vocabulary of digits has it."""
LONGEST_RESPONSE = 256
WAIT_S = 300
"""Longest time of curl for a response."""


def main(argv: Sequence[str]) -> int:
    """Runs `lrl prompt`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lrl prompt", description="Print the command that prompts a live policy."
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="the run's folder, on its machine, with generator-0.log")
    add("prompt", nargs="*", default=[], help=f"the prompt ({PROMPT})")
    add("--generator", metavar="N", type=int, default=0, help="which generator (%(default)s)")
    args = parser.parse_intermixed_args(argv)  # plain argparse takes no prompt after an option
    sys.stdout.write(lines(Path(args.run), args.generator, " ".join(args.prompt) or PROMPT))
    return 0


def lines(run: Path, number: int, prompt: str) -> str:
    """Returns the shell lines that send `prompt`; raises NotRunning if no such generator runs."""
    generator = find_generator(run, number)
    certificate = generator.certificate and shlex.quote(generator.certificate)
    extra = cacert = ""
    if certificate:
        extra = f"# For clients in Python also: export SSL_CERT_FILE={certificate}\n"
        cacert = f"--cacert {certificate} "
    route, body = request(generator, prompt)
    return f"""\
# The live policy of {run}, at {generator.name.lower()}. The token is the run's: its holder can also stop the run.
# Paste the lines, or run them without a trace in the history: source <(lrl prompt {shlex.quote(str(run))})
export OPENAI_BASE_URL={generator.location.url}/v1
export OPENAI_API_KEY={generator.token}
{extra}printf 'Authorization: Bearer %s\\n' "$OPENAI_API_KEY" | curl -sS -w '\\n' --noproxy '*' --max-time {WAIT_S} \\
  {cacert}-H @- -H 'Content-Type: application/json' "$OPENAI_BASE_URL/{route}" \\
  -d {body}
"""


def request(generator: Running, prompt: str) -> tuple[str, str]:
    """Returns the OpenAI route, and its body as a shell word: a chat if there is a template."""
    model = generator.ask("GET", "/v1/models")["data"][0]
    asked: dict[str, Any] = {"model": model["id"]}
    asked["messages"] = [{"role": "user", "content": prompt}]
    route = "chat/completions"
    try:
        generator.ask("POST", "/tokenize", asked)
    except NotRunning:  # without a chat template
        route = "completions"
        asked = {"model": model["id"], "prompt": prompt}
    asked["max_tokens"] = max(1, min(LONGEST_RESPONSE, model["max_model_len"] // 2))
    # Without a salt of the current second, vLLM would reuse keys and values of older weights for
    # the same prompt.
    start, end = f'{json.dumps(asked)[:-1]}, "cache_salt": "', '"}'
    return route, f'{shlex.quote(start)}"$(date +%s)"{shlex.quote(end)}'
