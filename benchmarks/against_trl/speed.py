"""lrl against TRL's GRPOTrainer at 5 million parameters: responses a second, with responses of
forced lengths.

    OMP_WAIT_POLICY=passive python -m benchmarks.against_trl.speed
    OMP_WAIT_POLICY=passive python -m benchmarks.against_trl.speed --repeats 1 --steps 2

The sides alternate in each repeat. Both train a policy of random weights in float32 on the same
prompts, with 8 x 16 responses a step of the same lengths (all 64 tokens, or long-tailed); the other
settings are those of `benchmarks.against_trl`. The counted steps of both are the same; the first of
TRL's and the first three of lrl's do not count.

Each side has all cores. TRL uses them for writing and for training in turn; lrl divides them in the
ways of `SYSTEMS`. lrl's waiting threads sleep, as with `lrl fit`; TRL's spin, which is faster (3.9 s
a step instead of 4.2 s). A figure is the mean over a run's counted steps, then least, median
and most of the repeats. The ratio is that of the medians, for the fastest of lrl's ways and of
TRL's.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import arguments, records, timed_run
from benchmarks.against_trl.settings import TRL, Job, trl_python, write_rows
from benchmarks.arguments import Row
from benchmarks.timed_run import CORES, GROUPS, LENGTHS, RESPONSES, WARM_UP, System
from lrl.quickstart.task import problems

HALF = max(1, CORES // 2)
LARGE = 8192
"""Tokens of a micro-batch for several threads that sleep while they wait for one another: the fewer
waits, the better. With `timed_run.MICRO_BATCH_TOKENS` a step took 4.0 s."""
SPLIT = System(title="lrl, halves, max_lag 1", server_threads=HALF, trainer_threads=HALF, max_lag=1)
TRAINER_ALL = System(
    title="lrl, all cores train, half write, max_lag 1",
    server_threads=HALF,
    trainer_threads=CORES,
    max_lag=1,
    micro_batch_tokens=LARGE,
)
SYSTEMS = {"split": SPLIT, "trainer-all": TRAINER_ALL}
SYSTEMS |= {
    f"{name}-bfloat16": replace(one, title=f"{one.title}, written in bfloat16", dtype="bfloat16")
    for name, one in SYSTEMS.items()
}
"""lrl's ways to divide the cores. All train in float32."""
TRL_PIECES = {"trl": 1, "trl-pieces": 8}
"""TRL's ways to train a step: whole, and in pieces of 16 responses, which with 64 tokens are lrl's
micro-batches."""
TRL_WARM_UP = 1
NAMES = [*TRL_PIECES, *SYSTEMS]
PARTS = ("step", "writing", "wait", "train", "sync")
SETTINGS: dict[str, Any] = {
    "repeats": (3, "of every side"),
    "steps": (4, "of a run that count"),
    "lengths": (list(LENGTHS), "of responses", LENGTHS),
    "systems": (NAMES, "in turn", NAMES),
}


def measure_trl(args: argparse.Namespace, name: str, lengths: str) -> dict[str, float]:
    """Returns the mean seconds of TRL's counted steps: writing plus training, rewards and
    advantages included.

    Raises:
        RuntimeError: A response did not have its drawn length.
    """
    folder = (args.folder / f"trl-{lengths}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows, first = problems(), (WARM_UP - TRL_WARM_UP) * GROUPS
    groups = range(first, first + (TRL_WARM_UP + args.steps) * GROUPS)
    drawn = [LENGTHS[lengths].of(group % len(rows), group, RESPONSES) for group in groups]
    by_step = [sum(drawn[start : start + GROUPS], []) for start in range(0, len(drawn), GROUPS)]
    prompts = write_rows(folder / "prompts.jsonl", [rows[one % len(rows)] for one in groups])
    job = Job(
        steps=len(by_step),
        policy=str(timed_run.policy_5m(args.folder).resolve()),
        prompts=str(prompts),
        folder=str(folder),
        lengths=str(folder / "lengths.json"),
        groups=GROUPS,
        rollouts=RESPONSES,
        lr=timed_run.LR,
        pieces=TRL_PIECES[name],
    )
    Path(job.lengths).write_text(json.dumps(by_step))
    job.clock.unlink(missing_ok=True)
    job.run(trl_python(Path("runs/against_trl/venv").resolve()), "trl_side", threads=CORES)
    before, *steps = records.read(job.clock)
    if [step["tokens"] for step in steps] != [sum(step) for step in by_step]:
        raise RuntimeError(f"TRL's responses do not have the lengths in {job.lengths}.")
    ends = [step["seconds"] for step in [before, *steps]]
    step_s = (ends[-1] - ends[TRL_WARM_UP]) / (len(steps) - TRL_WARM_UP)
    writing = fmean(step["writing"] for step in steps[TRL_WARM_UP:])
    found = {"step": step_s, "writing": writing, "train": step_s - writing}
    return found | {"wait": 0.0, "sync": 0.0}


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    if os.environ.get("OMP_WAIT_POLICY") != "passive":
        raise SystemExit("Start with OMP_WAIT_POLICY=passive, as `lrl fit` sets it.")
    policy = timed_run.policy_5m(args.folder)
    rows = {(row["lengths"], row["system"]): row for row in missing}
    ways = [SYSTEMS[name] for _, name in rows if name in SYSTEMS]
    with timed_run.servers_for(ways, policy, args.folder) as servers:

        def once(key: tuple[str, str]) -> dict[str, float]:
            lengths, name = key
            if name in TRL_PIECES:
                return measure_trl(args, name, lengths)
            where, drawn = servers[SYSTEMS[name]], LENGTHS[lengths]
            found = timed_run.run(SYSTEMS[name], where, policy, drawn, args.steps, args.folder)
            return found | {"writing": 0.0}  # it writes while it trains

        found = records.in_turns(rows, args.repeats, once)
    for key, row in rows.items():
        seconds = {part: found[key][part] for part in PARTS}
        step_s = found[key]["step"][1]
        assert step_s, "every side was measured"
        rate = records.rounded(GROUPS * RESPONSES / step_s)
        yield row | seconds | {"answers_per_s": rate, "trl": TRL}


def runs(args: argparse.Namespace) -> Iterator[Row]:
    shared = arguments.chosen(args, "steps", "repeats")
    for lengths in args.lengths:
        for name in args.systems:
            row = {"system": name, "lengths": lengths} | shared
            if name in SYSTEMS:
                row["micro_batch_tokens"] = SYSTEMS[name].micro_batch_tokens
            yield row


def table(rows: Sequence[Row]) -> str:
    heads = ["lengths", "system", "responses/s", "step (s)", "spread", "writing (s)", "waits (s)"]
    lines, ratios = [], []
    for row in rows:
        name, (least, middle, most) = row["system"], row["step"]
        whole = "" if TRL_PIECES.get(name, 1) == 1 else ", in pieces"
        title = SYSTEMS[name].title if name in SYSTEMS else f"TRL {row['trl']}{whole}"
        cells = [row["lengths"], title, f"{row['answers_per_s']:.1f}", f"{middle:.2f}"]
        rest = (f"{row[part][1]:.2f}" for part in PARTS[1:])
        lines.append([*cells, f"{least:.2f} to {most:.2f}", *rest])
    for lengths in dict.fromkeys(row["lengths"] for row in rows):
        of = {row["system"]: row["answers_per_s"] for row in rows if row["lengths"] == lengths}
        trl = max((of.pop(name) for name in TRL_PIECES if name in of), default=0.0)
        if trl and of:
            best = max(of, key=lambda name: of[name])
            told = f"{SYSTEMS[best].title} trains {of[best] / trl:.2f} times TRL's responses."
            ratios.append(f"\n{lengths}: {told}")
    return "\n".join([records.markdown([*heads, "training (s)", "sync (s)"], lines), *ratios])


if __name__ == "__main__":
    arguments.run("against_trl.speed", __doc__, SETTINGS, runs, measure, table)
