"""Kills each rank of a sharded run in each phase: loading, a step, a sync, a checkpoint, the
export.

    python -m benchmarks.chaos ranks

Two ranks, two generators. The run resumes after each death. A rank kills itself at a place in the
program (`benchmarks/chaos/deaths.py`), so that every phase is met.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.chaos.deaths import Death
from benchmarks.chaos.launch import WAIT_S, Target, TargetSettings, add_settings, settings_of
from benchmarks.chaos.trainer import outcome

log = logging.getLogger(__name__)

RANKS = 2
CALLS = {"load": 1, "step": 2, "sync": 60, "save": 2, "export": 1}
"""The call at which a rank dies: that of a sync is in the one after the first step, and that of a
checkpoint in the second. The export comes when all steps are done, and only after a step: see
`steps_until`."""

EXPLAINED = "look for its error above"
"""In the words with which a run ends after the loss of a rank (`lrl.distributed.ranks`)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, steps=12, groups=16, responses=4, capacity=4)


def run(args: argparse.Namespace) -> int:
    settings = settings_of(
        args, folder=str(args.folder.resolve()), steps_per_epoch=args.steps, ranks=RANKS
    )
    described = {"settings": settings.described}
    print(
        table(
            records.measured(
                args.out, described, lambda: measure(settings) | {"command": args.command}
            )
        )
    )
    return 0


def measure(settings: TargetSettings) -> dict[str, Any]:
    shutil.rmtree(settings.folder, ignore_errors=True)
    deaths = []
    for place in CALLS:
        for rank in reversed(range(RANKS)):
            launch = replace(settings, steps=steps_until(settings.steps, place, rank))
            deaths.append(kill(launch, Death(rank, place, CALLS[place])))
    with Target(settings) as target:
        target.wait(WAIT_S + 60.0 * settings.steps)
        left = target.leftovers()
    return {"deaths": deaths, "left": left, **outcome(settings, target.journal.refresh())}


def steps_until(steps: int, place: str, rank: int) -> int:
    """Returns the last step of the launch that ends by this death, of a run of `steps`.

    A run that resumes after its last step has nothing to export. So each launch that dies in the
    export has a step more than the one before it.
    """
    return steps - 1 - rank if place == "export" else steps


def kill(settings: TargetSettings, death: Death) -> dict[str, Any]:
    told = Path(settings.folder) / "died"
    told.unlink(missing_ok=True)
    with Target(settings, death) as target:
        status = target.process.wait(WAIT_S + 60.0 * settings.steps)
        ended, left = time.time(), target.leftovers()
    steps = [line["step"] for line in target.lines("start")]
    found = {
        **{
            "rank": death.rank,
            "place": death.place,
            "status": status,
            "steps_found": steps[0] if steps else None,
        },
        "end_s": round(ended - float(told.read_text()), 1),
        "explained": EXPLAINED in target.output.read_text(errors="replace"),
        **left,
    }
    log.info("%s", found)
    return found


def table(record: dict[str, Any]) -> str:
    columns = (
        "a rank dies in",
        "rank",
        "status of the run",
        "run ended after (s)",
        "nothing left after (s)",
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for death in record["deaths"]:
        gone = "never" if death["gone_s"] is None else death["gone_s"]
        lines.append(
            f"| {death['place']} | {death['rank']} | {death['status']} | {death['end_s']} | {gone} "
            "|"
        )
    trained = record["trained"]
    lines.append(
        f"\nLaunches {record['launches']}; steps {record['steps_done']}; prompts trained "
        f"{trained['prompts']}, missing {len(trained['missing'])}, twice {len(trained['twice'])}, "
        f"given up {len(record['given_up'])}; largest lag {record['lag_max']}; accuracy "
        f"{record['accuracy']:.3f}."
    )
    return "\n".join(lines)
