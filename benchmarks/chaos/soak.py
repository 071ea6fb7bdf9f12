"""A long run at its highest speed with a fault a minute, and whether anything of it grows: memory,
files, threads.

    ONEDNN_PRIMITIVE_CACHE_CAPACITY=32 python -m benchmarks.chaos soak --steps 2000 --every-s 60
    python -m benchmarks.chaos soak --steps 30 --every-s 20 --settle 5 --sample-s 1      a rehearsal

A fault kills or freezes a random part of a random generator, or kills a reward worker. The first
200 steps do not count. They have one fault of each kind, of all generators at once: they hold what
is made once in a run, and the leftovers of a fault show at its second time. Slopes are of the
samples in which all generators served: a lost one takes its memory with it. They are by least
squares, with 95 % intervals. The policy does not change (`--lr 0`): one that learns writes
responses of other lengths, and memory follows them. vLLM's matrix products keep a kernel for each
number of tokens that they have met, at most 1,024 of them: a generator then grows for 1,000 steps
after each of its starts. The variable bounds that cache, to make other growth visible. A
measurement that is in the results already is not repeated.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import psutil

from benchmarks import records
from benchmarks.chaos import footprint
from benchmarks.chaos.faults import FIRST, RandomFaults
from benchmarks.chaos.journal import accounted_for, surviving
from benchmarks.chaos.launch import (
    LOOK_S,
    WAIT_S,
    Ended,
    Target,
    TargetSettings,
    add_settings,
    settings_of,
)
from benchmarks.intervals import slope

CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
NAMES = (*footprint.NAMES, *footprint.HELD_NAMES)
"""What is watched."""
STEP_S = 300.0
"""Deadline of a step with its faults."""
HEAD = "| | mean | slope per 1,000 steps | 95 % interval |\n|---|---|---|---|"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--every-s", type=float, default=60.0, help="seconds between faults (%(default)s)"
    )
    parser.add_argument(
        "--sample-s", type=float, default=5.0, help="seconds between samples (%(default)s)"
    )
    parser.add_argument(
        "--settle", type=int, default=200, help="steps before the slopes begin (%(default)s)"
    )
    add_settings(
        parser, steps=2000, groups=2, responses=8, capacity=16, checkpoint_every=20, lr=0.0
    )


def run(args: argparse.Namespace) -> int:
    settings, kept = target_settings(args), os.environ.get(CACHE)
    asked = {
        "every_s": args.every_s,
        "settle": args.settle,
        "sample_s": args.sample_s,
        "first": [*map(str, FIRST)],
    }
    described = {"asked": asked, "kernels_kept": kept, "settings": settings.described}
    command = {"command": f"{CACHE}={kept} {args.command}" if kept else args.command}
    print(table(records.measured(args.out, described, lambda: measure(args, settings) | command)))
    return 0


def target_settings(args: argparse.Namespace) -> TargetSettings:
    return settings_of(args, steps_per_epoch=0, schedule="constant", evaluate=False)


def measure(args: argparse.Namespace, settings: TargetSettings) -> dict[str, Any]:
    started = time.monotonic()
    shutil.rmtree(settings.folder, ignore_errors=True)
    with Target(settings) as target:
        target.wait_for(lambda: target.lines("step"), WAIT_S, "its first step")
        faults = RandomFaults(target.process.pid, args.every_s, args.seed)
        samples = watch(target, faults, args.sample_s)
        target.wait(WAIT_S)
        left = target.leftovers()
    lineage = surviving(target.lines("step"))
    end = target.lines("end")[-1]
    settled = [sample for sample in samples if sample["whole"] and sample["step"] >= args.settle]
    return {
        "faults": dict(faults.counts),
        "seconds": round(time.monotonic() - started, 1),
        "left": left,
        "trained": accounted_for(lineage, end),
        "given_up": end["given_up"],
        "lag_max": max(line["lag_max"] for line in lineage),
        "unscored": sum(line["unscored"] for line in lineage),
        "fleet": lineage[-1]["fleet"],
        "samples": len(settled),
        "series": {
            name: thinned([sample[name] for sample in samples]) for name in ("step", *NAMES)
        },
        "slopes": {name: trend(settled, name) for name in NAMES},
        "collected": [
            {name: line[name] for name in ("step", *footprint.HELD_NAMES)}
            for line in target.lines("collected")
        ],
    }


def watch(target: Target, faults: RandomFaults, every_s: float) -> list[dict[str, float]]:
    """Takes samples of the run until it ends, and injects its faults meanwhile.

    Raises:
        TimeoutError: A step took longer than `STEP_S` seconds.
    """
    samples: list[dict[str, float]] = []
    due = time.monotonic()
    while target.process.poll() is None and not target.lines("end"):
        now, newest = time.monotonic(), target.lines("step")[-1]
        if time.time() - newest["time"] > STEP_S:
            raise TimeoutError(
                f"Step {newest['step'] + 1} did not end within {STEP_S:g} s; see {target.folder}."
            )
        whole = len(target.lines("lost")) == 0 or last_event(target) == "whole"
        try:
            if now >= due:
                own = {name: newest[name] for name in footprint.HELD_NAMES}
                samples.append(
                    footprint.footprint(target.process.pid)
                    | own
                    | {"step": newest["step"], "whole": whole}
                )
                due = now + every_s
            faults.tick(whole)
        except (psutil.NoSuchProcess, FileNotFoundError):
            break  # the run has ended
        time.sleep(LOOK_S)
    if target.process.poll():
        raise Ended(
            f"The run ended with exit status {target.process.returncode}; see {target.output}."
        )
    return samples


def last_event(target: Target) -> str:
    return max(target.lines("lost") + target.lines("whole"), key=lambda line: line["time"])["event"]


def trend(samples: Sequence[dict[str, float]], name: str) -> dict[str, float | None]:
    """Returns the mean of a series, its slope per 1,000 steps, and half of the slope's 95 %
    interval; None for too few samples."""
    values = [sample[name] for sample in samples]
    per_sample, half = slope(values)
    steps = samples[-1]["step"] - samples[0]["step"] if samples else 0.0
    scale = 1000 * (len(samples) - 1) / steps if steps else float("nan")
    found = {
        "mean": fmean(values) if values else float("nan"),
        "slope": per_sample * scale,
        "half": half * scale,
    }
    return {key: records.rounded(number) for key, number in found.items()}


def late(series: dict[str, list[float]], name: str) -> dict[str, float | None]:
    pairs = zip(series["step"], series[name], strict=True)
    return trend(
        [{"step": step, name: value} for step, value in pairs if step >= series["step"][-1] / 2],
        name,
    )


def thinned(values: list[float], most: int = 400) -> list[float]:
    return values[:: -(-len(values) // most) or 1]


def table(record: dict[str, Any]) -> str:
    rows = []
    for name, found in record["slopes"].items():
        numbers = [found["mean"], found["slope"], None, None]
        if found["slope"] is not None:
            numbers[2:] = [found["slope"] - found["half"], found["slope"] + found["half"]]
        mean, by, low, high = (
            "too few samples" if number is None else f"{number:.4g}" for number in numbers
        )
        rows.append(f"| {name} | {mean} | {by} | {low} to {high} |")
    memory = late(record["series"], "trainer_rss_mib")
    if memory["slope"] is not None and memory["half"] is not None:
        ends = f"{memory['slope'] - memory['half']:.2g} to {memory['slope'] + memory['half']:.2g}"
        rows.append(
            f"\ntrainer_rss_mib over the second half of the steps: {memory['slope']:.2g} ({ends})."
        )
    for line in record["collected"]:
        held_then = (
            f"{line['trainer_heap_mib']:.2f} MiB and {line['trainer_python_blocks']:,.0f} blocks"
        )
        rows.append(f"\nBehind a full collection after step {line['step']}: {held_then} given out.")
    faults = ", ".join(f"{times} {kind}" for kind, times in record["faults"].items())
    trained = record["trained"]
    wrong = ", ".join(f"{len(trained[name])} {name}" for name in ("twice", "lost", "untold"))
    rows.append(
        f"\nFaults: {faults or 'none'}. Prompts trained: {trained['prompts']} ({wrong}). "
        f"{record['fleet']}"
    )
    return "\n".join([HEAD, *rows])
