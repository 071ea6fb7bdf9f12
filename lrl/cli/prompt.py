"""`lrl prompt`: prints shell lines that prompt the policy of a live run.

The lines hold the run's token. It reaches curl through a pipe that the shell fills, because every user of the machine
can read a command line.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lrl.errors import NotRunning
from lrl.members.run_file import Running, find_generator
from lrl.rollouts.chat_template import with_beginning

PROMPT = "1+1="
"""Prompt if none is given; even a vocabulary of digits has it."""
LONGEST_RESPONSE = 256
WAIT_S = 300
"""Longest time of curl for a response."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints how to prompt a generator.

    Args:
        argv: The words after `lrl prompt`.

    Returns:
        Exit status: 2 if the command is wrong, or no such generator runs.
    """
    parser = argparse.ArgumentParser(
        prog="lrl prompt", description="Print the command that prompts a live policy."
    )
    parser.add_argument(
        "run", metavar="RUN", help="the run's folder, on its machine, with generator-0.log"
    )
    parser.add_argument("prompt", nargs="*", default=[], help=f"the prompt ({PROMPT})")
    parser.add_argument(
        "--generator", metavar="N", type=int, default=0, help="which generator (%(default)s)"
    )
    args = parser.parse_intermixed_args(argv)  # plain argparse takes no prompt after an option
    try:
        sys.stdout.write(lines(Path(args.run), args.generator, " ".join(args.prompt) or PROMPT))
    except NotRunning as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 2
    return 0


def lines(run: Path, number: int, prompt: str) -> str:
    """Returns the shell lines that send `prompt`; raises NotRunning if no such generator runs."""
    generator = find_generator(run, number)
    certificate = generator.certificate and shlex.quote(generator.certificate)
    extra = (
        f"# For clients in Python also: export SSL_CERT_FILE={certificate}\n" if certificate else ""
    )
    cacert = f"--cacert {certificate} " if certificate else ""
    route, body = request(generator, prompt)
    return f"""\
# The live policy of {run}, at {generator.name}. The token is the run's: its holder can also stop the run.
# Paste the lines, or run them without a trace in the history: source <(lrl prompt {shlex.quote(str(run))})
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
        raise NotRunning(
            f"{generator.name} at {generator.url} responded {status} on /v1/models: {found}"
        )
    model = found["data"][0]
    chat = [{"role": "user", "content": prompt}]
    has_template = (
        generator.ask("POST", "/tokenize", {"model": model["id"], "messages": chat})[0] == 200
    )
    fields = {
        "model": model["id"],
        **(
            {"messages": chat}
            if has_template
            else {"prompt": plain_prompt(generator, model["id"], prompt)}
        ),
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
            raise NotRunning(
                f"{generator.name} at {generator.url} responded {status} on /tokenize: {found}"
            )
        tokens.append(found["tokens"])
    added, alone = tokens
    trained = with_beginning(added, alone)
    return prompt if trained == added else trained
