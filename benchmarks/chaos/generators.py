"""Kills and freezes the generators of one run, one after the other and once both; the run trains on
meanwhile.

    python -m benchmarks.chaos generators                            12 kills, 4 freezes, both at once
    python -m benchmarks.chaos generators --kills 1 --freezes 1 --no-both       a rehearsal

The next fault comes when all generators serve again and two steps have been trained. After the last
one the file `stop` ends the run. A measurement that is in the results already is not repeated.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import records
from benchmarks.chaos.faults import GENERATORS, Fault, in_turn
from benchmarks.chaos.journal import Line, accounted_for, surviving, told
from benchmarks.chaos.launch import WAIT_S, Target, TargetSettings, add_settings, settings_of

log = logging.getLogger(__name__)

STEPS_BETWEEN = 2
"""Steps trained by all generators before the next fault, and before the end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kills", type=int, default=12, help="API server, EngineCore, Worker in turn (%(default)s)"
    )
    parser.add_argument(
        "--freezes", type=int, default=4, help="likewise, between the kills (%(default)s)"
    )
    parser.add_argument(
        "--both", action=argparse.BooleanOptionalAction, default=True, help="at last both at once"
    )
    add_settings(parser, groups=4, responses=8, capacity=16, lr=5e-5)


def run(args: argparse.Namespace) -> int:
    settings = settings_of(args, steps=-1, steps_per_epoch=0, schedule="constant")
    asked = {"kills": args.kills, "freezes": args.freezes, "both": args.both}
    described = {"asked": asked, "settings": settings.described}
    print(
        table(
            records.measured(
                args.out, described, lambda: measure(args, settings) | {"command": args.command}
            )
        )
    )
    return 0


def measure(args: argparse.Namespace, settings: TargetSettings) -> dict[str, Any]:
    started = time.monotonic()
    shutil.rmtree(settings.folder, ignore_errors=True)
    with Target(settings) as target:
        target.wait_for(
            lambda: len(target.lines("step")) >= STEPS_BETWEEN, WAIT_S, "its first steps"
        )
        faults = []
        for fault in in_turn(args.kills, args.freezes, args.both):
            faults.append(measure_fault(target, fault))
            log.info("%s", faults[-1])
        (target.folder / "stop").touch()
        target.wait(WAIT_S)
        left = target.leftovers()
    lineage = surviving(target.lines("step"))
    end = target.lines("end")[-1]
    return {
        "faults": faults,
        "seconds": round(time.monotonic() - started, 1),
        "left": left,
        "steps_done": len(lineage),
        "trained": accounted_for(lineage, end),
        "given_up": end["given_up"],
        "lag_max": max(line["lag_max"] for line in lineage),
        "restarts": lineage[-1]["fleet"]["restarts"],
        "accuracy": end["accuracy"],
    }


def measure_fault(target: Target, fault: Fault) -> dict[str, Any]:
    """Injects a fault and waits until the run has all generators again and has trained on.

    Returns:
        The fault; `detected_s` until the last of its generators was evicted; `whole_s` until all
            serve; `reissued`,
        responses that continued on another generator.
    """
    whole, steps = (len(target.lines(event)) for event in ("whole", "step"))
    lost = len(losses(target, fault))
    before = target.lines("step")[-1]["fleet"]["reissued"]
    at = time.time()
    fault.inject(target.process.pid)
    target.wait_for(lambda: losses(target, fault)[lost:], WAIT_S, f"the loss ({fault})")
    target.wait_for(lambda: len(target.lines("whole")) > whole, WAIT_S, f"the return ({fault})")
    back = target.lines("whole")[-1]
    trained = target.lines("step")[steps:]
    meanwhile = sum(line["time"] < back["time"] for line in trained)
    last = len(target.lines("step")) + STEPS_BETWEEN
    target.wait_for(
        lambda: len(target.lines("step")) >= last, WAIT_S, f"the steps after it ({fault})"
    )
    found = losses(target, fault)[lost]
    return {
        "fault": str(fault),
        "detected_s": round(found["time"] - at, 2),
        "whole_s": round(back["time"] - at, 1),
        "reissued": back["reissued"] - before,
        "steps_meanwhile": meanwhile,
        "why": found["why"],
    }


def losses(target: Target, fault: Fault) -> Sequence[Line]:
    return [
        line
        for line in target.lines("lost")
        if line["members"] <= GENERATORS - len(fault.generators)
    ]


def table(record: dict[str, Any]) -> str:
    faults, trained = record["faults"], record["trained"]
    lines = [
        (f["fault"], f"{f['detected_s']:.1f}", f"{f['whole_s']:.0f}", f["reissued"]) for f in faults
    ]
    detected, whole = (median(f[name] for f in faults) for name in ("detected_s", "whole_s"))
    lines.append(("median of all", f"{detected:.1f}", f"{whole:.0f}", ""))
    heads = ("fault", "seconds to detection", "seconds to full speed", "responses reissued")
    return (
        f"{records.markdown(heads, lines)}\n\n{record['steps_done']} steps, {told(trained)}, "
        f"{len(record['given_up'])} given up, largest lag {record['lag_max']}, accuracy "
        f"{record['accuracy']:.3f}, {record['seconds'] / 60:.0f} minutes"
    )
