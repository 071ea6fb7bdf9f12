"""Seconds from the start of a run to its first step, by what starts its generators.

    python -m benchmarks.first_step                     needs root, for a network namespace, and Ray
    python -m benchmarks.first_step --kinds local ray --repeats 1

The quickstart's task with two generators. `local`: both on the trainer's machine, started by the
run. `given` and `ray`: one on each of two machines, the second a network namespace; the Ray cluster
is up before the run. `trainer`: two trainer nodes with a generator each. The way to the first step
has the imports, the start of vLLM, the joining, the first sync with its proof, and the writing of
the first responses.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import arguments, records
from benchmarks.chaos.launch import WAIT_S, Target, TargetSettings
from benchmarks.chaos.second_node import Beside, second_node, settings_words
from tests.network_namespace import HERE

KINDS = ("local", "given", "ray", "trainer")
HEAD = (
    "| generators | first version in all of them after (s) | first step done after (s) "
    "|\n|---|---|---|"
)


def seconds(kind: str, folder: Path) -> dict[str, Any]:
    """Returns the seconds until all generators have the first version, and until the first step is
    done."""
    settings = TargetSettings(
        folder=str(folder),
        steps=1,
        groups=4,
        responses=8,
        capacity=16,
        evaluate=False,
        schedule="constant",
    )
    shutil.rmtree(folder, ignore_errors=True)
    elsewhere = (
        second_node(kind, secrets.token_hex(16))
        if kind != "local"
        else nullcontext((None, Beside()))
    )
    with elsewhere as (_, beside):
        if kind != "local":
            settings = replace(
                settings,
                second_node=kind,
                host=HERE,
                launcher=settings_words(beside),
                heartbeat_s=30.0,
            )
        with Target(settings, variables=beside.variables) as target:
            beside.launched(target)
            target.wait(WAIT_S)
            beside.ended()
            (start,), (step,) = target.lines("start"), target.lines("step")
    found = {
        "start_s": start["time"] - target.started,
        "first_step_s": step["time"] - target.started,
    }
    return {name: round(value, 1) for name, value in found.items()}


def measure(args: argparse.Namespace, command: str) -> None:
    """Measures what is not there yet."""
    made = records.read(args.out)
    for wanted in runs_of(args):
        if records.find(made, wanted) is None:
            records.append(
                args.out,
                wanted | seconds(wanted["kind"], args.folder / "run") | {"command": command},
            )
            logging.info("%s", wanted)


def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the fields by which the records are found: the kinds in turn."""
    return [
        {"kind": kind, "repeat": repeat} for repeat in range(args.repeats) for kind in args.kinds
    ]


def table(made: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown: medians over the repeats."""
    lines = [HEAD]
    for kind in KINDS:
        if own := [one for one in made if one["kind"] == kind]:
            start, step = (median(one[name] for one in own) for name in ("start_s", "first_step_s"))
            lines.append(f"| {kind} | {start:.0f} | {step:.0f} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_step", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="(all)")
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    arguments.add_print_only(parser, "first_step")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, unless it only prints; then prints."""
    return arguments.measure_and_print(make_parser(), argv, measure, runs_of, table)


if __name__ == "__main__":
    sys.exit(main())
