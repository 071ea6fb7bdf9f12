"""Kills the trainer of a run at random moments and resumes it each time; beside it the same run
unbroken.

    python -m benchmarks.chaos trainer                          20 kills in 60 steps, two epochs
    python -m benchmarks.chaos trainer --kills 2 --steps 8      a rehearsal
    python -m benchmarks.chaos trainer --kills 6 --steps 30 \\
        --environment lrl.quickstart.calculator.Calculator      kills between the turns of episodes

The moments follow from the seed: spread over the run's progress, each a random part of a step
later; one in ten falls into the start instead. A measurement that is in the results already is not
repeated.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from benchmarks import records
from benchmarks.arguments import Row, add
from benchmarks.chaos import launch
from benchmarks.chaos.journal import Line, account, surviving, told
from benchmarks.chaos.launch import WAIT_S, Target, TargetSettings

log = logging.getLogger(__name__)

EPOCHS = 2
WHILE_STARTING = 10
"""One kill in so many falls into the start of a launch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, kills=(20, "of the trainer"))
    launch.add_settings(parser, steps=60, groups=16, responses=4, capacity=4, environment="")


def runs(args: argparse.Namespace) -> list[Row]:
    if args.steps % EPOCHS or args.steps < 6 or args.kills < 1:
        raise SystemExit(
            f"--steps {args.steps} --kills {args.kills}: give an even number from 6 on, and a kill."
        )
    settings = launch.described(args, steps_per_epoch=args.steps // EPOCHS)
    return [{"asked_kills": kills, "settings": settings} for kills in (0, args.kills)]


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    made, unbroken = records.read(args.out), None
    for row in missing:
        kills = row["asked_kills"]
        folder = str((args.folder / ("killed" if kills else "unbroken")).resolve())
        settings = TargetSettings(folder=folder, **row["settings"])
        if kills:
            unbroken = unbroken or records.find(made, row | {"asked_kills": 0})
            yield row | measure_killed(kills, settings, unbroken)
        else:
            unbroken = row | measure_unbroken(settings)
            yield unbroken


@dataclass(frozen=True)
class Moment:
    """When a launch is killed.

    Args:
        step: The step whose end is waited for; the kill comes in the step after it.
        share: Part of that step, or of the start.
        starting: The kill comes while the launch starts, at any step.
    """

    step: int
    share: float
    starting: bool = False


def plan(kills: int, steps: int, seed: int) -> list[Moment]:
    draw = random.Random(seed)
    part = (steps - 3) / kills
    moments = [
        Moment(int(part * (number + draw.random())), draw.random()) for number in range(kills)
    ]
    for number in draw.sample(range(kills), kills // WHILE_STARTING):
        moments[number] = Moment(moments[number].step, moments[number].share, starting=True)
    return moments


def measure_unbroken(settings: TargetSettings) -> Row:
    """Returns the run's account, and its pace: seconds of a start, until the first version is in
    the generators, and median seconds of a step."""
    shutil.rmtree(settings.folder, ignore_errors=True)
    with Target(settings) as target:
        target.wait(WAIT_S + 60.0 * settings.steps)
        left = target.leftovers()
    times = [line["time"] for line in target.lines("step")]
    pace = {
        "start_s": round(target.lines("start")[0]["time"] - target.started, 1),
        "step_s": round(median(later - one for one, later in pairwise(times)), 2),
    }
    return pace | {"left": left, **outcome(settings, target.journal.refresh())}


def measure_killed(times: int, settings: TargetSettings, pace: Row) -> Row:
    started = time.monotonic()
    shutil.rmtree(settings.folder, ignore_errors=True)
    kills = []
    for number, moment in enumerate(plan(times, settings.steps, settings.seed)):
        with Target(settings) as target:
            progress = wait_for_moment(target, moment, pace)
            target.kill()
            of_launch = {"launch": target.number, "progress": progress}
            kills.append(asdict(moment) | of_launch | target.leftovers())
        log.info("Kill %d of %d: %s", number + 1, times, kills[-1])
    with Target(settings) as target:
        target.wait(WAIT_S + 60.0 * settings.steps)
        left = target.leftovers()
    lines = target.journal.refresh()
    starts = [line for line in lines if line["event"] == "start"]
    for kill in kills:
        later = (line["resumed"] for line in starts if line["launch"] > kill["launch"])
        kill["resumed"] = next(later)
    seconds = round(time.monotonic() - started, 1)
    return {"kills": kills, "seconds": seconds, "left": left, **outcome(settings, lines)}


def wait_for_moment(target: Target, moment: Moment, pace: Row) -> int:
    """Waits for the moment of the kill; returns the last step that the launch has done, -1 while it
    starts."""
    if moment.starting:
        until = time.monotonic() + moment.share * pace["start_s"]
        # A start may be quicker than the one that was measured, and the launch must not run on to
        # its end.
        target.wait_for(lambda: time.monotonic() > until or target.lines("start"), "its start")
    else:
        target.wait_for(lambda: progress_of(target) >= moment.step, f"step {moment.step}")
        time.sleep(moment.share * pace["step_s"])
    return progress_of(target)


def progress_of(target: Target) -> int:
    found = [line["step"] - 1 for line in target.lines("start")]
    return max(found + [line["step"] for line in target.lines("step")], default=-1)


def outcome(settings: TargetSettings, lines: Sequence[Line]) -> Row:
    starts = [line for line in lines if line["event"] == "start"]
    steps = [line for line in lines if line["event"] == "step"]
    lineage = surviving(steps)
    by_launch = {line["launch"]: line["played_again"] for line in steps}
    return {
        **account(lines, settings.steps_per_epoch * settings.groups),
        "responses_resumed": sum(line["resumed"]["responses"] for line in starts),
        "tokens_resumed": sum(line["resumed"]["tokens"] for line in starts),
        "answers_continued": sum(line["continued"] for line in lineage),
        "answers_rewritten": sum(line["rewritten"] for line in lineage),
        "failed": sum(line["failed"] for line in lineage),
        "played_again": dict(sum(map(Counter, by_launch.values()), Counter())),
    }


def table(made: Sequence[Row]) -> str:
    unbroken, record = made
    kills, again = record["kills"], record["played_again"]
    lines = {
        "kills (of these while starting)": (
            f"{len(kills)} ({sum(kill['starting'] for kill in kills)})"
        ),
        "epochs in which every prompt was trained once": record["trained"]["epochs_whole"],
        "kills that left half-written responses": sum(
            kill["resumed"]["responses"] > 0 for kill in kills
        ),
        "such responses; their tokens": (
            f"{record['responses_resumed']}; {record['tokens_resumed']}"
        ),
        "of them trained with their tokens; without": (
            f"{record['answers_continued']}; {record['answers_rewritten']}"
        ),
        "kills after which something stayed for 20 s": sum(
            kill["gone_s"] is None for kill in kills
        ),
        "kills that left a temporary file": sum(bool(kill["temporary_files"]) for kill in kills),
        "accuracy; of the unbroken run": f"{record['accuracy']:.3f}; {unbroken['accuracy']:.3f}",
        "minutes": f"{record['seconds'] / 60:.0f}",
        "episodes that failed; played again from their turns; begun again": (
            f"{record['failed']}; {again.get('replayed', 0)}; {again.get('restarted', 0)}"
        ),
    }
    return f"{records.markdown(['', ''], lines.items())}\n\n{told(record)}"
