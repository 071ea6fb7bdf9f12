"""The command of the fault injection: `python -m benchmarks.chaos EXPERIMENT ...`."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence

from benchmarks import arguments

EXPERIMENTS = {
    "generators": "kill and freeze generators while the run trains on",
    "trainer": "kill the trainer at random moments and resume it",
    "ranks": "kill each rank of a sharded run in each phase",
    "nodes": "kill each kind of process on two machines, and cut the cable",
    "sync": "break each phase of a sync in each way",
    "soak": "a long run with a fault a minute; whether memory, files, threads grow",
    "rewards": "rewards that raise, crash, never end, ...",
    "environments": "environments that raise, crash, never answer, ...",
}


def make_parser(name: str) -> argparse.ArgumentParser:
    experiment = importlib.import_module(f"benchmarks.chaos.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.chaos {name}",
        description=experiment.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    experiment.add_arguments(parser)
    arguments.add_places(parser, f"chaos_{name}", plot=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    described = "\n".join(f"  {name:12} {about}" for name, about in EXPERIMENTS.items())
    choice = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        usage=(
            "python -m benchmarks.chaos EXPERIMENT [settings]; EXPERIMENT --help lists the settings"
        ),
        description="Fault injection on real runs of the quickstart's task.\n\n" + described,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choice.add_argument("experiment", choices=EXPERIMENTS)
    name = choice.parse_args(words[:1]).experiment
    args = arguments.parse(make_parser(name), words[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    return importlib.import_module(f"benchmarks.chaos.{name}").run(args)


if __name__ == "__main__":
    raise SystemExit(main())
