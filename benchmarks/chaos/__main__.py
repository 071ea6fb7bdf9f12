"""Fault injection on real runs of the quickstart's task: `python -m benchmarks.chaos EXPERIMENT`."""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks import arguments

EXPERIMENTS = {
    "generators": "kill and freeze generators while the run trains on",
    "trainer": "kill the trainer at random moments and resume it",
    "nodes": "kill each kind of process on two machines, and cut the cable",
    "sync": "break each phase of a sync in each way",
    "rewards": "rewards that raise, crash, never end, ...",
    "environments": "environments that raise, crash, never answer, ...",
}
SHARED = {"rewards": "workers", "environments": "workers"}
"""Modules of several experiments. Each module has `add_arguments`, `runs`, `measure` and `table`."""


def main() -> int:
    choice = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    names = choice.add_subparsers(dest="experiment", required=True)
    for name, about in EXPERIMENTS.items():
        names.add_parser(name, help=about, add_help=False)
    name = choice.parse_known_args(sys.argv[1:2])[0].experiment
    found = importlib.import_module(f"benchmarks.chaos.{SHARED.get(name, name)}")
    parser = arguments.make_parser(f"chaos {name}", found.__doc__)
    parser.set_defaults(experiment=name)
    found.add_arguments(parser)
    arguments.add_places(parser, f"chaos_{name}")
    return arguments.run(parser, sys.argv[2:], found.runs, found.measure, found.table)


if __name__ == "__main__":
    raise SystemExit(main())
