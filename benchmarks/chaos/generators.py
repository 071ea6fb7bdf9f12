"""Kills and freezes the generators of one run, one after the other and once both; the run trains on meanwhile.

    python -m benchmarks.chaos.generators                            12 kills, 4 freezes, both at once
    python -m benchmarks.chaos.generators --kills 1 --freezes 1 --no-both       a rehearsal

The next fault comes when all generators serve again and two steps have been trained. After the last one the run is told
to end, which it does by itself.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks import records
from benchmarks.chaos.faults import Fault, in_turn
from benchmarks.chaos.journal import Line
from benchmarks.chaos.launch import Victim
from benchmarks.chaos.lineage import accounted_for, surviving
from benchmarks.chaos.settings import GENERATORS, VictimSettings, add_deadlines

log = logging.getLogger(__name__)

WAIT_S = 900.0
"""For anything that the run is waited for."""
STEPS_BETWEEN = 2
"""Steps trained by all generators before the next fault, and before the end."""
HEAD = "| fault | seconds to detection | seconds to full speed | responses reissued |\n|---|---|---|---|"


def settings_of(args: argparse.Namespace) -> VictimSettings:
    """A run without an end, on all training problems."""
    return VictimSettings(
        folder=str(args.folder.resolve()),
        steps=-1,
        steps_per_epoch=0,
        groups=args.groups,
        responses=args.responses,
        capacity=args.capacity,
        seed=args.seed,
        lr=args.lr,
        schedule="constant",
        heartbeat_s=args.heartbeat_s,
        sync_deadline_s=args.sync_deadline_s,
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The run from its start to its record."""
    settings, started = settings_of(args), time.monotonic()
    shutil.rmtree(settings.folder, ignore_errors=True)
    with Victim(settings) as victim:
        faults = suffer_all(victim, in_turn(args.kills, args.freezes, args.both))
        (victim.folder / "stop").touch()
        victim.wait(WAIT_S)
        left = victim.leftovers()
    return {
        **described(args),
        "faults": faults,
        "seconds": round(time.monotonic() - started, 1),
        "left": left,
        **outcome(victim),
    }


def suffer_all(victim: Victim, faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Break the run with one fault after the other; see `suffered`."""
    victim.wait_for(lambda: len(victim.lines("step")) >= STEPS_BETWEEN, WAIT_S, "its first steps")
    found = []
    for fault in faults:
        found.append(suffered(victim, fault))
        log.info("%s", found[-1])
    return found


def suffered(victim: Victim, fault: Fault) -> dict[str, Any]:
    """Break the run, wait until it is whole again and has trained on, and say how long that took.

    Returns:
        The fault; `detected_s` until the last of its generators was taken out; `whole_s` until all serve; `reissued`,
        responses that went on with another generator.
    """
    whole, steps = (len(victim.lines(event)) for event in ("whole", "step"))
    lost = len(losses(victim, fault))
    before = victim.lines("step")[-1]["fleet"]["reissued"]
    at = time.time()
    fault.inject(victim.process.pid)
    victim.wait_for(lambda: losses(victim, fault)[lost:], WAIT_S, f"the loss ({fault})")
    victim.wait_for(lambda: len(victim.lines("whole")) > whole, WAIT_S, f"the return ({fault})")
    back = victim.lines("whole")[-1]
    trained = victim.lines("step")[steps:]
    meanwhile = sum(line["time"] < back["time"] for line in trained)
    last = len(victim.lines("step")) + STEPS_BETWEEN
    victim.wait_for(lambda: len(victim.lines("step")) >= last, WAIT_S, f"the steps after it ({fault})")
    found = losses(victim, fault)[lost]
    return {
        "fault": str(fault),
        "detected_s": round(found["time"] - at, 2),
        "whole_s": round(back["time"] - at, 1),
        "reissued": back["reissued"] - before,
        "steps_meanwhile": meanwhile,
        "why": found["why"],
    }


def losses(victim: Victim, fault: Fault) -> list[Line]:
    """The lines that tell of as many generators out as the fault hits."""
    return [line for line in victim.lines("lost") if line["members"] <= GENERATORS - len(fault.generators)]


def outcome(victim: Victim) -> dict[str, Any]:
    """What the whole run has come to, from its journal."""
    lineage, end = surviving(victim.lines("step")), victim.lines("end")[-1]
    return {
        "steps_done": len(lineage),
        "trained": accounted_for(lineage, end),
        "given_up": end["given_up"],
        "lag_max": max(line["lag_max"] for line in lineage),
        "restarts": lineage[-1]["fleet"]["restarts"],
        "accuracy": end["accuracy"],
    }


def described(args: argparse.Namespace) -> dict[str, Any]:
    """What a measurement is recognised by."""
    asked = {"kills": args.kills, "freezes": args.freezes, "both": args.both}
    return {"asked": asked, "settings": settings_of(args).described}


def table(record: dict[str, Any]) -> str:
    """The measurement as lines of text."""
    faults, trained = record["faults"], record["trained"]
    rows = [f"| {f['fault']} | {f['detected_s']:.1f} | {f['whole_s']:.0f} | {f['reissued']} |" for f in faults]
    detected, whole = (median(fault[name] for fault in faults) for name in ("detected_s", "whole_s"))
    rows.append(f"| median of all | {detected:.1f} | {whole:.0f} | |")
    wrong = ", ".join(f"{len(trained[name])} {name}" for name in ("twice", "lost", "untold"))
    rows.append(
        f"\n{record['steps_done']} steps, {trained['prompts']} prompts trained ({wrong}; {len(record['given_up'])} "
        f"given up), largest lag {record['lag_max']}, accuracy {record['accuracy']:.3f}, "
        f"{record['seconds'] / 60:.0f} minutes"
    )
    return "\n".join([HEAD, *rows])


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.generators", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=12, help="API server, EngineCore, Worker in turn (%(default)s)")
    parser.add_argument("--freezes", type=int, default=4, help="likewise, between the kills (%(default)s)")
    parser.add_argument("--both", action=argparse.BooleanOptionalAction, default=True, help="at last both at once")
    parser.add_argument("--groups", type=int, default=4, help="problems a step (%(default)s)")
    parser.add_argument("--responses", type=int, default=8, help="to each (%(default)s)")
    parser.add_argument("--capacity", type=int, default=16, help="responses a generator writes at once (%(default)s)")
    parser.add_argument("--lr", type=float, default=5e-5, help="learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    add_deadlines(parser)
    records.add_places(parser, "chaos_generators", plot=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure unless it is there, then print the table."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if records.find(records.read(args.out), described(args)) is None:
        command = shlex.join(["python", "-m", "benchmarks.chaos.generators", *words])
        records.append(args.out, measure(args) | {"command": command})
    record = records.find(records.read(args.out), described(args))
    assert record is not None, "it was just written"
    print(table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
