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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks import records
from benchmarks.chaos.journal import Line, surviving, trained_once
from benchmarks.chaos.launch import WAIT_S, Target, TargetSettings, add_settings, settings_of

log = logging.getLogger(__name__)

EPOCHS = 2
WHILE_STARTING = 10
"""One kill in so many falls into the start of a launch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20, help="(%(default)s)")
    add_settings(parser, steps=60, groups=16, responses=4, capacity=4, environment="")


def run(args: argparse.Namespace) -> int:
    if args.steps % EPOCHS or args.steps < 6 or args.kills < 1:
        raise SystemExit(
            f"--steps {args.steps} --kills {args.kills}: give an even number from 6 on, and a kill."
        )
    command = {"command": args.command}
    whole, broken = (
        settings_of(
            args, folder=str((args.folder / name).resolve()), steps_per_epoch=args.steps // EPOCHS
        )
        for name in ("unbroken", "killed")
    )
    described = {"asked_kills": 0, "settings": whole.described}
    unbroken = records.measured(args.out, described, lambda: measure_unbroken(whole) | command)
    pace = Pace(unbroken["start_s"], unbroken["step_s"])
    described["asked_kills"] = args.kills
    killed = records.measured(
        args.out, described, lambda: measure_killed(args.kills, broken, pace) | command
    )
    print(table(killed, unbroken))
    return 0


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


@dataclass(frozen=True)
class Pace:
    """Durations on this machine, from the unbroken run."""

    start_s: float
    """Seconds from the launch until the first version is in the generators."""
    step_s: float
    """Median seconds of a step."""


def plan(kills: int, steps: int, seed: int) -> list[Moment]:
    draw = random.Random(seed)
    part = (steps - 3) / kills
    moments = [
        Moment(int(part * (number + draw.random())), draw.random()) for number in range(kills)
    ]
    for number in draw.sample(range(kills), kills // WHILE_STARTING):
        moments[number] = Moment(moments[number].step, moments[number].share, starting=True)
    return moments


def measure_unbroken(settings: TargetSettings) -> dict[str, Any]:
    shutil.rmtree(settings.folder, ignore_errors=True)
    with Target(settings) as target:
        target.wait(WAIT_S + 60.0 * settings.steps)
        left = target.leftovers()
    steps = target.lines("step")
    pace = Pace(
        round(target.lines("start")[0]["time"] - target.started, 1), round(seconds_a_step(steps), 2)
    )
    return {**asdict(pace), "left": left, **outcome(settings, target.journal.refresh())}


def measure_killed(times: int, settings: TargetSettings, pace: Pace) -> dict[str, Any]:
    started = time.monotonic()
    minutes = ((times + 1) * pace.start_s + (settings.steps + times) * pace.step_s) / 60
    log.info("%d kills take about %.0f minutes.", times, minutes)
    shutil.rmtree(settings.folder, ignore_errors=True)
    kills = []
    for number, moment in enumerate(plan(times, settings.steps, settings.seed)):
        with Target(settings) as target:
            progress = wait_for_moment(target, moment, pace)
            target.kill()
            kills.append(
                asdict(moment)
                | {"launch": target.number, "progress": progress}
                | target.leftovers()
            )
        log.info("Kill %d of %d: %s", number + 1, times, kills[-1])
    with Target(settings) as target:
        target.wait(WAIT_S + 60.0 * settings.steps)
        left = target.leftovers()
    lines = target.journal.refresh()
    for kill in kills:
        kill["resumed"] = next(
            line["resumed"]
            for line in lines
            if line["event"] == "start" and line["launch"] > kill["launch"]
        )
    return {
        "kills": kills,
        "seconds": round(time.monotonic() - started, 1),
        "left": left,
        **outcome(settings, lines),
    }


def wait_for_moment(target: Target, moment: Moment, pace: Pace) -> int:
    """Waits for the moment of the kill; returns the last step that the launch has done, -1 while it
    starts."""
    if moment.starting:
        until = time.monotonic() + moment.share * pace.start_s
        # A start may be quicker than the one that was measured, and the launch must not run on to
        # its end.
        target.wait_for(
            lambda: time.monotonic() > until or target.lines("start"), WAIT_S, "its start"
        )
        return progress_of(target)
    target.wait_for(lambda: progress_of(target) >= moment.step, WAIT_S, f"step {moment.step}")
    time.sleep(moment.share * pace.step_s)
    return progress_of(target)


def progress_of(target: Target) -> int:
    found = [line["step"] - 1 for line in target.lines("start")] + [
        line["step"] for line in target.lines("step")
    ]
    return max(found, default=-1)


def seconds_a_step(steps: Sequence[Line]) -> float:
    return median(
        later["time"] - line["time"] for line, later in zip(steps, steps[1:], strict=False)
    )


def outcome(settings: TargetSettings, lines: Sequence[Line]) -> dict[str, Any]:
    starts = [line for line in lines if line["event"] == "start"]
    lineage = surviving([line for line in lines if line["event"] == "step"])
    end = next(line for line in reversed(lines) if line["event"] == "end")
    return {
        "launches": sum(line["event"] == "launch" for line in lines),
        "steps_done": len(lineage),
        "trained": trained_once(lineage, settings.steps_per_epoch * settings.groups),
        "given_up": end["given_up"],
        "lag_max": max(line["lag_max"] for line in lineage),
        "responses_resumed": sum(line["resumed"]["responses"] for line in starts),
        "tokens_resumed": sum(line["resumed"]["tokens"] for line in starts),
        "answers_continued": sum(line["continued"] for line in lineage),
        "answers_rewritten": sum(line["rewritten"] for line in lineage),
        "failed": sum(line["failed"] for line in lineage),
        "played_again": played_again(lines),
        "accuracy": end["accuracy"],
    }


def played_again(lines: Sequence[Line]) -> dict[str, int]:
    by_launch = {line["launch"]: line["played_again"] for line in lines if line["event"] == "step"}
    total: Counter[str] = Counter()
    for counts in by_launch.values():
        total.update(counts)
    return dict(total)


def table(record: dict[str, Any], unbroken: dict[str, Any]) -> str:
    kills, trained, again = record["kills"], record["trained"], record["played_again"]
    wrong = f"{len(trained['missing'])}; {len(trained['twice'])}"
    lines = {
        "kills (of these while starting)": (
            f"{len(kills)} ({sum(kill['starting'] for kill in kills)})"
        ),
        "prompts trained; missing; twice": f"{trained['prompts']}; {wrong}",
        "epochs in which every prompt was trained once": trained["epochs_whole"],
        "prompts given up": len(record["given_up"]),
        "kills that left half-written responses to go on with": sum(
            kill["resumed"]["responses"] > 0 for kill in kills
        ),
        "such responses; their tokens": (
            f"{record['responses_resumed']}; {record['tokens_resumed']}"
        ),
        "of them trained with their tokens; without": (
            f"{record['answers_continued']}; {record['answers_rewritten']}"
        ),
        "largest lag": record["lag_max"],
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
    return records.markdown(["", ""], lines.items())
