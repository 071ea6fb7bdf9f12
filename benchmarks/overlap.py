"""How well generation and training overlap: a step's seconds beside those of either side alone, on
the same machine.

    python -m benchmarks.overlap --repeats 1 --steps 2            a rehearsal

A policy of 5 million random weights, 8 prompts x 16 responses a step, all responses of 64 tokens or
long-tailed (`benchmarks.timed_run`), trained in float32 and written in `--dtype`. The systems take
turns in each repeat:

- asynchronous: half of the threads write, half train, within a lag that the longest response needs;
- writing alone: the same run, but the trainer only takes the responses. Unlike a run at lag 0, it
  has as many responses in flight;
- training alone: the same training on responses that are there already, without syncs;
- synchronous: `placement: shared` at `max_lag: 0`: the sides take turns, each with all threads.

Every run has the same prompts and lengths, step by step. It begins with `max_lag` + 1 steps'
responses at once, and the longest of these hold a step some time later; so the first eight steps do
not count. A figure is the mean over the counted steps of a run, then least, median and most of the
repeats. The ratio is that of the medians: asynchronous / larger of both alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

import lrl
from benchmarks import arguments, records, timed_run
from benchmarks.arguments import Row
from benchmarks.random_policy import llama
from benchmarks.ready_responses import ReadyResponses
from benchmarks.runs import quiet_trainer
from benchmarks.timed_run import CORES, LENGTHS, MICRO_BATCH_TOKENS, System
from lrl.planning.workload import Lognormal
from lrl.training.model import Dtype, open_tokenizer

ALONE = ("writing", "training")
NAMES = ["asynchronous", *ALONE, "synchronous"]
MAX_LAG = {"equal": 2, "long-tailed": 6}
"""Of the asynchronous run, by the lengths of its responses: wide enough for the longest one."""
WARM_UP = 8
"""First steps of every run that do not count."""
HEADS = ("lengths", "system", "step (s)", "spread", "waits (s)", "sync (s)", "pause (s)")
SETTINGS: dict[str, Any] = {
    "repeats": (2, "of every system"),
    "steps": (16, "of a run that count"),
    "lengths": (list(LENGTHS), "of responses", LENGTHS),
    "dtype": ("bfloat16", "of generators", get_args(Dtype)),
    "systems": (NAMES, "in turn", NAMES),
}


def systems(lengths: str, dtype: Dtype = "bfloat16") -> dict[str, System]:
    half = max(1, CORES // 2)
    halves: dict[str, Any] = {"server_threads": half, "trainer_threads": half, "dtype": dtype}
    halves["max_lag"] = MAX_LAG[lengths]
    whole: dict[str, Any] = {"server_threads": CORES, "trainer_threads": CORES, "dtype": dtype}
    return {
        "asynchronous": System(title="asynchronous", **halves),
        "writing": System(title="writing alone", trains=False, **halves),
        "training": System(title="training alone", **halves),
        "synchronous": System(
            title="synchronous, all cores", placement="shared", max_lag=0, **whole
        ),
    }


def train_alone(
    system: System, policy: Path, lengths: Lognormal, steps: int, folder: Path
) -> dict[str, float]:
    """Trains on responses that are there already; returns mean seconds."""
    prompts = lrl.Prompts(timed_run.TASK, shuffle=False)
    prompts.load(open_tokenizer(str(policy)), timed_run.PROMPT_TOKENS)
    data = ReadyResponses(
        prompts,
        llama("5m").vocab_size,
        lengths,
        groups=timed_run.GROUPS,
        responses=timed_run.RESPONSES,
        micro_batch_tokens=system.micro_batch_tokens,
    )
    torch.set_num_threads(system.trainer_threads)
    module = lrl.PolicyModule(str(policy), lr=timed_run.LR, dtype="float32")
    quiet_trainer(WARM_UP + steps, folder, callbacks=[data.supervisor]).fit(module, data)
    mean = timed_run.means(data.supervisor.times[WARM_UP:])
    return mean | {"step": mean["train"], "wait": 0.0}


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    policy = timed_run.policy_5m(args.folder)
    of = {
        (row["lengths"], row["system"]): systems(row["lengths"], args.dtype)[row["system"]]
        for row in missing
    }
    with timed_run.servers_for(list(of.values()), policy, args.folder) as servers:

        def once(key: tuple[str, str]) -> dict[str, float]:
            lengths, system = LENGTHS[key[0]], of[key]
            if key[1] == "training":
                return train_alone(system, policy, lengths, args.steps, args.folder)
            where = {"folder": args.folder, "warm_up": WARM_UP}
            return timed_run.run(system, servers[system], policy, lengths, args.steps, **where)

        found = records.in_turns(of, args.repeats, once)
    for row in missing:
        yield row | found[row["lengths"], row["system"]]


def runs(args: argparse.Namespace) -> Iterator[Row]:
    shared = arguments.chosen(args, "steps", "repeats", "dtype")
    shared["micro_batch_tokens"] = MICRO_BATCH_TOKENS
    for lengths in args.lengths:
        own = {"lengths": lengths, "max_lag": MAX_LAG[lengths], "warm_up": WARM_UP}
        yield from ({"system": name} | own | shared for name in args.systems)


def table(rows: Sequence[Row]) -> str:
    lines, ratios = [], []
    for row in rows:
        least, middle, most = row["step"]
        title = systems(row["lengths"])[row["system"]].title
        rest = [f"{row[part][1]:.2f}" for part in ("wait", "sync")]
        pause = f"{row['sync_pause'][1]:.3f}"
        spread = f"{least:.2f} to {most:.2f}"
        lines.append([row["lengths"], title, f"{middle:.2f}", spread, *rest, pause])
    for lengths in dict.fromkeys(row["lengths"] for row in rows):
        step = {row["system"]: row["step"][1] for row in rows if row["lengths"] == lengths}
        if {"asynchronous", *ALONE} <= set(step):
            larger = max(step[name] for name in ALONE)
            told = f"{step['asynchronous'] / larger:.2f} times the larger of both alone"
            if "synchronous" in step:
                times = step["synchronous"] / step["asynchronous"]
                told += f", and is {times:.2f} times as fast as lrl's synchronous one on all cores"
            ratios.append(f"\n{lengths}: an asynchronous step takes {told}.")
    return "\n".join([records.markdown(HEADS, lines), *ratios])


if __name__ == "__main__":
    arguments.run("overlap", __doc__, SETTINGS, runs, measure, table)
