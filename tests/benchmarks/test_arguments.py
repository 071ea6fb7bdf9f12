"""The command line that a record keeps."""

import argparse
import shlex

import pytest

from benchmarks import arguments


@pytest.mark.parametrize(
    "words", [[], ["--steps", "3"], ["--prompts", "my rows.jsonl", "--steps", "3"]]
)
def test_the_command_of_a_record_repeats_its_arguments(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.some")
    parser.add_argument("--prompts")
    parser.add_argument("--steps", type=int, default=1)
    args = arguments.parse(parser, words)
    program, again = shlex.split(args.command)[:3], shlex.split(args.command)[3:]
    assert program == ["python", "-m", "benchmarks.some"]
    assert arguments.parse(parser, again) == args
