"""Fault injection on real runs of the quickstart's task: `python -m benchmarks.chaos EXPERIMENT`."""

from __future__ import annotations

import argparse
import importlib
import logging
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
"""Modules of several experiments."""


def main() -> int:
    choice = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    names = choice.add_subparsers(dest="experiment", required=True)
    for name, about in EXPERIMENTS.items():
        names.add_parser(name, help=about, add_help=False)
    name = choice.parse_known_args(sys.argv[1:2])[0].experiment
    experiment = importlib.import_module(f"benchmarks.chaos.{SHARED.get(name, name)}")
    parser = arguments.make_parser(f"chaos {name}", experiment.__doc__)
    parser.set_defaults(experiment=name)
    experiment.add_arguments(parser)
    arguments.add_places(parser, f"chaos_{name}")
    args = arguments.parse(parser, sys.argv[2:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    return experiment.run(args)


if __name__ == "__main__":
    raise SystemExit(main())
