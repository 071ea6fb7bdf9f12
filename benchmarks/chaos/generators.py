"""Kills and freezes the generators of one run, one after the other and once both; the run trains on
meanwhile.

    python -m benchmarks.chaos generators                            12 kills, 4 freezes, both at once
    python -m benchmarks.chaos generators --kills 1 --freezes 1 --no-both       a rehearsal

The next fault comes when all generators serve again and two steps have been trained.
"""

from __future__ import annotations

import argparse

from benchmarks.arguments import Row, add
from benchmarks.chaos import broken_run, launch
from benchmarks.chaos.faults import in_turn

measure, table = broken_run.measure, broken_run.table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        kills=(12, "API server, EngineCore, Worker in turn"),
        freezes=(4, "likewise, between the kills"),
    )
    parser.add_argument(
        "--both", action=argparse.BooleanOptionalAction, default=True, help="at last both at once"
    )
    launch.add_settings(parser, groups=4, responses=8, capacity=16, lr=5e-5)


def runs(args: argparse.Namespace) -> list[Row]:
    faults = [[fault, "step"] for fault in in_turn(args.kills, args.freezes, args.both)]
    settings = launch.described(args, steps=-1, steps_per_epoch=0, schedule="constant")
    return [{"faults_asked": faults, "settings": settings}]
