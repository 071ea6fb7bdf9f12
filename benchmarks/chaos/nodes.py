"""Breaks a run on two machines: each kind of process killed, the cable cut for five seconds and for
good.

    python -m benchmarks.chaos nodes --second given                      needs root, for a network namespace
    python -m benchmarks.chaos nodes --second ray trainer --places step  one phase alone

The second machine is a network namespace. With `given` and `ray` each machine has a generator of
that launcher; with `trainer` it has a second rank with a generator of its own. Each fault comes in
the middle of a step, of a sync, and of a checkpoint (`benchmarks/chaos/faults.py`), in one run, when
all generators serve again and two steps have been trained since the one before. A fault that ends
the run has it resumed from its checkpoint. "For good" is until the generator is out, or the run has
ended; then the cable is connected again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks.arguments import Row, add
from benchmarks.chaos import broken_run, launch
from benchmarks.chaos.broken_run import FOR_GOOD, OF_GENERATOR, OF_RAY, SHORTLY
from benchmarks.chaos.faults import PLACES

SECONDS = ["given", "ray", "trainer"]
measure, table = broken_run.measure, broken_run.table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        second=(SECONDS, "one run for each", SECONDS),
        places=(list(PLACES), "of the faults", PLACES),
    )
    parser.add_argument("--faults", nargs="+", help="(all)")
    how = {"heartbeat_s": 10.0, "sync_deadline_s": 30.0}
    launch.add_settings(parser, groups=4, responses=8, capacity=16, lr=5e-5, **how)


def runs(args: argparse.Namespace) -> Iterator[Row]:
    how = {"steps": -1, "steps_per_epoch": 0, "schedule": "constant", "evaluate": False}
    for kind in args.second:
        faults = plan(kind, args.places)
        wanted = [one for one in faults if args.faults is None or one[0] in args.faults]
        settings = launch.described(args, second_node=kind, **how)
        yield {"faults_asked": wanted, "settings": settings}


def plan(kind: str, places: list[str]) -> list[list[str]]:
    """Returns the faults of a kind of second node, each with its place."""
    common = [*OF_GENERATOR, "reward worker", SHORTLY, FOR_GOOD, "trainer"]
    common += ["rank 1"] if kind == "trainer" else []
    found = [[fault, place] for place in places for fault in common]
    return found + [[fault, "step"] for fault in OF_RAY if kind == "ray"]
