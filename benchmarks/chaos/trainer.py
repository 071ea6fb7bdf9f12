"""Kills the trainer of a run at random moments and resumes it each time; beside it the same run unbroken.

    python -m benchmarks.chaos.trainer                          20 kills in 60 steps, two epochs
    python -m benchmarks.chaos.trainer --kills 2 --steps 8      a rehearsal

The moments follow from the seed: spread over the run's progress, each a random part of a step later; one in ten falls
into the start instead. A measurement that is in the results already is not made again.
"""

from __future__ import annotations

import argparse
import logging
import random
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks import records
from benchmarks.chaos.journal import Line
from benchmarks.chaos.launch import Victim
from benchmarks.chaos.lineage import surviving, trained_once
from benchmarks.chaos.settings import VictimSettings, add_deadlines

log = logging.getLogger(__name__)

EPOCHS = 2
WAIT_S = 900.0
"""For anything that a launch is waited for."""
WHILE_STARTING = 10
"""One kill in so many falls into the start of a launch."""


@dataclass(frozen=True)
class Moment:
    """When a launch is killed.

    Args:
        step: The run's progress that is waited for; the kill comes in the step behind it.
        share: Part of that step, or of the start.
        starting: Kill while the launch starts, whatever the progress.
    """

    step: int
    share: float
    starting: bool = False


@dataclass(frozen=True)
class Pace:
    """How long things take on this machine, from the unbroken run."""

    start_s: float
    """Seconds from the launch until the first version is in the generators."""
    step_s: float
    """Median seconds of a step."""


def plan(kills: int, steps: int, seed: int) -> list[Moment]:
    """The moments of a run's kills, in the order of their steps; none is so late that the launch could end before."""
    draw = random.Random(seed)
    part = (steps - 3) / kills
    moments = [Moment(int(part * (number + draw.random())), draw.random()) for number in range(kills)]
    for number in draw.sample(range(kills), kills // WHILE_STARTING):
        moments[number] = Moment(moments[number].step, moments[number].share, starting=True)
    return moments


def settings_of(args: argparse.Namespace, name: str) -> VictimSettings:
    """Exactly two epochs, in a folder of their own."""
    folder = str((args.folder / name).resolve())
    return VictimSettings(
        folder=folder,
        steps=args.steps,
        steps_per_epoch=args.steps // EPOCHS,
        groups=args.groups,
        responses=args.responses,
        capacity=args.capacity,
        seed=args.seed,
        heartbeat_s=args.heartbeat_s,
        sync_deadline_s=args.sync_deadline_s,
    )


def fresh(settings: VictimSettings) -> VictimSettings:
    """The same settings, with an empty folder."""
    shutil.rmtree(settings.folder, ignore_errors=True)
    return settings


def measure_unbroken(args: argparse.Namespace) -> dict[str, Any]:
    """One launch from its start to its record."""
    settings = settings_of(args, "unbroken")
    with Victim(fresh(settings)) as victim:
        victim.wait(WAIT_S + 60.0 * settings.steps)
        left = victim.leftovers()
    steps = victim.lines("step")
    pace = Pace(round(victim.lines("start")[0]["time"] - victim.started, 1), round(seconds_a_step(steps), 2))
    return {**described(args, 0), **asdict(pace), "left": left, **outcome(settings, victim.journal.refresh())}


def measure_killed(args: argparse.Namespace, pace: Pace) -> dict[str, Any]:
    """All launches of the run that is killed, and its record."""
    settings, started = fresh(settings_of(args, "killed")), time.monotonic()
    kills = []
    for number, moment in enumerate(plan(args.kills, args.steps, args.seed)):
        with Victim(settings) as victim:
            progress = wait_for_moment(victim, moment, pace)
            victim.kill()
            kills.append(asdict(moment) | {"launch": victim.number, "progress": progress} | victim.leftovers())
        log.info("Kill %d of %d: %s", number + 1, args.kills, kills[-1])
    with Victim(settings) as victim:
        victim.wait(WAIT_S + 60.0 * settings.steps)
        left = victim.leftovers()
    lines = victim.journal.refresh()
    for kill in kills:
        kill["resumed"] = next(
            line["resumed"] for line in lines if line["event"] == "start" and line["launch"] > kill["launch"]
        )
    return {
        **described(args, args.kills),
        "kills": kills,
        "seconds": round(time.monotonic() - started, 1),
        "left": left,
        **outcome(settings, lines),
    }


def wait_for_moment(victim: Victim, moment: Moment, pace: Pace) -> int:
    """Return at the moment of the kill, with the step that the launch had done last; -1 while it starts."""
    if moment.starting:
        until = time.monotonic() + moment.share * pace.start_s
        # A start may be quicker than the one that was measured, and the launch must not run on to its end.
        victim.wait_for(lambda: time.monotonic() > until or victim.lines("start"), WAIT_S, "its start")
        return progress_of(victim)
    victim.wait_for(lambda: progress_of(victim) >= moment.step, WAIT_S, f"step {moment.step}")
    time.sleep(moment.share * pace.step_s)
    return progress_of(victim)


def progress_of(victim: Victim) -> int:
    """The last step that this launch has done or has found done; -1 before it knows."""
    found = [line["step"] - 1 for line in victim.lines("start")] + [line["step"] for line in victim.lines("step")]
    return max(found, default=-1)


def seconds_a_step(steps: Sequence[Line]) -> float:
    """Median time between the lines of a launch."""
    return median(later["time"] - line["time"] for line, later in zip(steps, steps[1:], strict=False))


def outcome(settings: VictimSettings, lines: Sequence[Line]) -> dict[str, Any]:
    """What a whole run has come to, from its journal."""
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
        "accuracy": end["accuracy"],
    }


def described(args: argparse.Namespace, kills: int) -> dict[str, Any]:
    """What a measurement is recognised by."""
    return {"asked_kills": kills, "settings": settings_of(args, "").described}


def table(record: dict[str, Any], unbroken: dict[str, Any]) -> str:
    """The measurement as lines of text."""
    kills, trained = record["kills"], record["trained"]
    late = [kill for kill in kills if kill["gone_s"] is None]
    half = sum(kill["resumed"]["responses"] > 0 for kill in kills)
    rows = {
        "kills (of these while starting)": f"{len(kills)} ({sum(kill['starting'] for kill in kills)})",
        "prompts trained; missing; twice": f"{trained['prompts']}; {len(trained['missing'])}; {len(trained['twice'])}",
        "epochs in which every prompt was trained once": trained["epochs_whole"],
        "prompts given up": len(record["given_up"]),
        "kills that left half-written responses to go on with": half,
        "such responses; their tokens": f"{record['responses_resumed']}; {record['tokens_resumed']}",
        "of them trained with their tokens; without": f"{record['answers_continued']}; {record['answers_rewritten']}",
        "largest lag": record["lag_max"],
        "kills after which something stayed for 20 s": len(late),
        "kills that left a temporary file": sum(bool(kill["temporary_files"]) for kill in kills),
        "accuracy; of the unbroken run": f"{record['accuracy']:.3f}; {unbroken['accuracy']:.3f}",
        "minutes": f"{record['seconds'] / 60:.0f}",
    }
    return "\n".join(["| | |\n|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.trainer", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="two epochs; an even number (%(default)s)")
    parser.add_argument("--groups", type=int, default=16, help="problems a step (%(default)s)")
    parser.add_argument("--responses", type=int, default=4, help="to each (%(default)s)")
    parser.add_argument("--capacity", type=int, default=4, help="responses a generator writes at once (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the run and of the kills (%(default)s)")
    add_deadlines(parser)
    records.add_places(parser, "chaos_trainer", plot=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, then print the table."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    if args.steps % EPOCHS or args.steps < 6 or args.kills < 1:
        raise SystemExit(f"--steps {args.steps} --kills {args.kills}: give an even number from 6 on, and a kill.")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    command = {"command": shlex.join(["python", "-m", "benchmarks.chaos.trainer", *words])}
    if records.find(records.read(args.out), described(args, 0)) is None:
        records.append(args.out, measure_unbroken(args) | command)
    unbroken = records.find(records.read(args.out), described(args, 0))
    assert unbroken is not None, "it was just written"
    pace = Pace(unbroken["start_s"], unbroken["step_s"])
    if records.find(records.read(args.out), described(args, args.kills)) is None:
        minutes = ((args.kills + 1) * pace.start_s + (args.steps + args.kills) * pace.step_s) / 60
        log.info("%d kills will take about %.0f minutes.", args.kills, minutes)
        records.append(args.out, measure_killed(args, pace) | command)
    killed = records.find(records.read(args.out), described(args, args.kills))
    assert killed is not None, "it was just written"
    print(table(killed, unbroken))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
