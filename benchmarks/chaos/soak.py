"""A long run at its highest speed with a fault a minute, and whether anything of it grows: memory, files, threads.

    ONEDNN_PRIMITIVE_CACHE_CAPACITY=32 python -m benchmarks.chaos.soak --steps 2000 --every-s 60
    python -m benchmarks.chaos.soak --steps 30 --every-s 20 --settle 5 --sample-s 1      a rehearsal

A fault kills or freezes a random part of a random generator, or kills a reward worker. The steps that do not count, the
first 200, have had one of each kind by then, of all generators at once: what is made once in a run is made there, and
what a fault leaves behind is seen at its second time. Slopes are of the samples in which all generators served: a lost
one takes its memory with it. They are by least squares, with 95 % intervals. The policy stands still (`--lr 0`): one
that learns writes responses of other lengths, and memory follows them. And vLLM's products of matrices keep a kernel
for each number of tokens that they have met, at most 1,024 of them: a generator then grows for 1,000 steps behind each
of its starts. The variable bounds that cache, so that what else grows can be seen.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import psutil

from benchmarks import records
from benchmarks.chaos import footprint, held
from benchmarks.chaos.launch import LOOK_S, Ended, Victim
from benchmarks.chaos.lineage import accounted_for, surviving
from benchmarks.chaos.settings import VictimSettings, add_deadlines
from benchmarks.chaos.soak_faults import FIRST, Faults
from benchmarks.intervals import slope

log = logging.getLogger(__name__)

CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
NAMES = (*footprint.NAMES, *held.NAMES)
"""What is watched."""

START_S, STEP_S = 900.0, 300.0
"""The longest that the start, and a step with its faults, may take."""
HEAD = "| | mean | slope per 1,000 steps | 95 % interval |\n|---|---|---|---|"


def settings_of(args: argparse.Namespace) -> VictimSettings:
    """Small steps, few checkpoints."""
    return VictimSettings(
        folder=str(args.folder.resolve()),
        steps=args.steps,
        steps_per_epoch=0,
        groups=args.groups,
        responses=args.responses,
        capacity=args.capacity,
        seed=args.seed,
        lr=args.lr,
        schedule="constant",
        checkpoint_every=args.checkpoint_every,
        evaluate=False,
        heartbeat_s=args.heartbeat_s,
        sync_deadline_s=args.sync_deadline_s,
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The run from its start to its record."""
    settings, started = settings_of(args), time.monotonic()
    shutil.rmtree(settings.folder, ignore_errors=True)
    with Victim(settings) as victim:
        victim.wait_for(lambda: victim.lines("step"), START_S, "its first step")
        faults = Faults(victim, args.every_s, args.seed)
        samples = watch(victim, faults, args.sample_s)
        victim.wait(START_S)
        left = victim.leftovers()
    lineage, end = surviving(victim.lines("step")), victim.lines("end")[-1]
    settled = [sample for sample in samples if sample["whole"] and sample["step"] >= args.settle]
    return {
        **described(args),
        "faults": dict(faults.counts),
        "seconds": round(time.monotonic() - started, 1),
        "left": left,
        "trained": accounted_for(lineage, end),
        "given_up": end["given_up"],
        "lag_max": max(line["lag_max"] for line in lineage),
        "unscored": sum(line["unscored"] for line in lineage),
        "fleet": lineage[-1]["fleet"],
        "samples": len(settled),
        "series": {name: thinned([sample[name] for sample in samples]) for name in ("step", *NAMES)},
        "slopes": {name: trend(settled, name) for name in NAMES},
        "collected": [{name: line[name] for name in ("step", *held.NAMES)} for line in victim.lines("collected")],
    }


def watch(victim: Victim, faults: Faults, every_s: float) -> list[dict[str, float]]:
    """Samples of the run until it ends, with its faults meanwhile.

    Raises:
        TimeoutError: A step took longer than `STEP_S` seconds.
    """
    samples: list[dict[str, float]] = []
    due = time.monotonic()
    while victim.process.poll() is None and not victim.lines("end"):
        now, newest = time.monotonic(), victim.lines("step")[-1]
        if time.time() - newest["time"] > STEP_S:
            raise TimeoutError(f"Step {newest['step'] + 1} did not end within {STEP_S:g} s; see {victim.folder}.")
        whole = len(victim.lines("lost")) == 0 or last_event(victim) == "whole"
        try:
            if now >= due:
                own = {name: newest[name] for name in held.NAMES}
                samples.append(footprint.footprint(victim.process.pid) | own | {"step": newest["step"], "whole": whole})
                due = now + every_s
            faults.tick(whole)
        except (psutil.NoSuchProcess, FileNotFoundError):
            break  # the run has ended
        time.sleep(LOOK_S)
    if victim.process.poll():
        raise Ended(f"The run ended with exit status {victim.process.returncode}; see {victim.output}.")
    return samples


def last_event(victim: Victim) -> str:
    """Whether the fleet's newest line is of a loss or of all being there."""
    return max(victim.lines("lost") + victim.lines("whole"), key=lambda line: line["time"])["event"]


def trend(samples: Sequence[dict[str, float]], name: str) -> dict[str, float | None]:
    """Mean of a series, its slope per 1,000 steps, and half of that one's 95 % interval; None for too few samples."""
    values = [sample[name] for sample in samples]
    per_sample, half = slope(values)
    steps = samples[-1]["step"] - samples[0]["step"] if samples else 0.0
    scale = 1000 * (len(samples) - 1) / steps if steps else float("nan")
    found = {"mean": fmean(values) if values else float("nan"), "slope": per_sample * scale, "half": half * scale}
    return {key: records.rounded(number) for key, number in found.items()}


def late(series: dict[str, list[float]], name: str) -> dict[str, float | None]:
    """The trend of a series over the second half of the steps."""
    pairs = zip(series["step"], series[name], strict=True)
    return trend([{"step": step, name: value} for step, value in pairs if step >= series["step"][-1] / 2], name)


def thinned(values: list[float], most: int = 400) -> list[float]:
    """At most so many of them, evenly spread."""
    return values[:: -(-len(values) // most) or 1]


def described(args: argparse.Namespace) -> dict[str, Any]:
    """What a measurement is recognised by."""
    asked = {"every_s": args.every_s, "settle": args.settle, "sample_s": args.sample_s, "first": [*map(str, FIRST)]}
    return {"asked": asked, "kernels_kept": os.environ.get(CACHE), "settings": settings_of(args).described}


def table(record: dict[str, Any]) -> str:
    """The measurement as lines of text."""
    rows = []
    for name, found in record["slopes"].items():
        numbers = [found["mean"], found["slope"], None, None]
        if found["slope"] is not None:
            numbers[2:] = [found["slope"] - found["half"], found["slope"] + found["half"]]
        mean, by, low, high = ("too few samples" if number is None else f"{number:.4g}" for number in numbers)
        rows.append(f"| {name} | {mean} | {by} | {low} to {high} |")
    memory = late(record["series"], "trainer_rss_mib")
    if memory["slope"] is not None and memory["half"] is not None:
        ends = f"{memory['slope'] - memory['half']:.2g} to {memory['slope'] + memory['half']:.2g}"
        rows.append(f"\ntrainer_rss_mib over the second half of the steps: {memory['slope']:.2g} ({ends}).")
    for line in record["collected"]:
        held_then = f"{line['trainer_heap_mib']:.2f} MiB and {line['trainer_python_blocks']:,.0f} blocks"
        rows.append(f"\nBehind a full collection after step {line['step']}: {held_then} given out.")
    faults, trained = ", ".join(f"{times} {kind}" for kind, times in record["faults"].items()), record["trained"]
    wrong = ", ".join(f"{len(trained[name])} {name}" for name in ("twice", "lost", "untold"))
    rows.append(f"\nFaults: {faults or 'none'}. Prompts trained: {trained['prompts']} ({wrong}). {record['fleet']}")
    return "\n".join([HEAD, *rows])


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--every-s", type=float, default=60.0, help="seconds between faults (%(default)s)")
    parser.add_argument("--sample-s", type=float, default=5.0, help="seconds between samples (%(default)s)")
    parser.add_argument("--settle", type=int, default=200, help="steps before the slopes begin (%(default)s)")
    parser.add_argument("--groups", type=int, default=2, help="problems a step (%(default)s)")
    parser.add_argument("--responses", type=int, default=8, help="to each (%(default)s)")
    parser.add_argument("--capacity", type=int, default=16, help="responses a generator writes at once (%(default)s)")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps (%(default)s)")
    lr_help = "learning rate; with 0 the policy, and with it the work of a step, stays what it is (%(default)s)"
    parser.add_argument("--lr", type=float, default=0.0, help=lr_help)
    parser.add_argument("--seed", type=int, default=0, help="of the run and of the faults (%(default)s)")
    add_deadlines(parser)
    records.add_places(parser, "chaos_soak", plot=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure unless it is there, then print the table."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if records.find(records.read(args.out), described(args)) is None:
        bound = [f"{CACHE}={os.environ[CACHE]}"] if CACHE in os.environ else []
        command = shlex.join([*bound, "python", "-m", "benchmarks.chaos.soak", *words])
        records.append(args.out, measure(args) | {"command": command})
    record = records.find(records.read(args.out), described(args))
    assert record is not None, "it was just written"
    print(table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
