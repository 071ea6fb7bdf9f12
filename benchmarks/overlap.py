"""How well generation and training overlap: a step's seconds beside those of either side alone, on
the same machine.

    python -m benchmarks.overlap                                  measure and print
    python -m benchmarks.overlap --repeats 1 --steps 2            a rehearsal
    python -m benchmarks.overlap --print-only                     print what is there

A policy of 5 million random weights, 8 prompts x 16 responses a step, all responses of 64 tokens or
long-tailed (`benchmarks.timed_run`). It is trained in float32 and written with in bfloat16, as in
lrl's recipes, or in `--dtype`. The four systems alternate in each repeat:

- asynchronous: half of the threads write, half train, and the bound on lag is wide enough for the
  longest response (`MAX_LAG`): one of 512 tokens takes the engine five or six steps of the trainer.
- writing alone: the same run, but the trainer only takes the responses: no forward pass, no update,
  no sync but the first one. So as many responses are in flight as in the asynchronous run. A run at
  lag 0 would not do: at the end of every step's batch a few long responses are written alone, which
  steady writing never sees.
- training alone: the same training on responses that are there already, with the asynchronous run's
  threads. No sync.
- synchronous: lrl's own baseline, `placement: shared` at `max_lag: 0`: the sides take turns, each
  with all threads.

Two servers run from the first system to the last, one with half of the threads and one with all;
that which is not used sleeps. Every run has the same prompts and lengths, step by step. A run
begins with `max_lag` + 1 steps' responses at once, and the longest of these hold a step some time
later; so the first eight steps do not count. Count 16: the next six hardly ever wait, and some of
those behind them do. A figure is the mean over the counted steps of a run, then least, median and
most of the repeats. The ratio is that of the medians: asynchronous / larger of both alone.

"On a core" are the CPU seconds of the trainer's own thread; with one thread that is all it
computes. What its step takes beyond them, its waits and the sync, is waiting for a core; what they
are more than alone, a core that is slower.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import Any, get_args

from benchmarks import arguments, records, timed_run
from benchmarks.lent_server import LentServer
from benchmarks.ready_responses import train_alone
from benchmarks.timed_run import LENGTHS, MICRO_BATCH_TOKENS, System
from lrl.training.model import Dtype

ALONE = ("writing", "training")
MAX_LAG = {"equal": 2, "long-tailed": 6}
"""Of the asynchronous run, by the lengths of its responses: wide enough for the longest one."""
WARM_UP = 8
"""First steps of every run that do not count."""
PARTS = {"wait": ".2f", "sync": ".2f", "sync_pause": ".3f", "on_core": ".2f"}
"""Columns of the table beside a step's seconds, and their format."""
HEADS = ("lengths", "system", "step (s)", "spread", "waits (s)", "sync (s)", "pause (s)")
HEADS += ("on a core (s)",)


def systems(
    lengths: str, micro_batch_tokens: int = MICRO_BATCH_TOKENS, dtype: Dtype = "bfloat16"
) -> dict[str, System]:
    max_lag = MAX_LAG[lengths]
    cores = len(os.sched_getaffinity(0))
    half = max(1, cores // 2)
    both: dict[str, Any] = {"micro_batch_tokens": micro_batch_tokens, "dtype": dtype}
    halves = {"server_threads": half, "trainer_threads": half} | both
    whole = {"server_threads": cores, "trainer_threads": cores} | both
    return {
        "asynchronous": System(title="asynchronous", max_lag=max_lag, **halves),
        "writing": System(title="writing alone", max_lag=max_lag, trains=False, **halves),
        "training": System(title="training alone", max_lag=max_lag, **halves),
        "synchronous": System(
            title="synchronous, all cores", max_lag=0, placement="shared", **whole
        ),
    }


def measure(
    args: argparse.Namespace, servers: dict[System, LentServer], name: str, lengths: str
) -> dict[str, float]:
    system, draws = systems(lengths, args.micro_batch_tokens, args.dtype)[name], LENGTHS[lengths]
    policy = timed_run.policy_5m(args.folder)
    if name == "training":
        times = train_alone(system, policy, draws, WARM_UP + args.steps, args.folder)
        mean = timed_run.means(times[WARM_UP:])
        return mean | {"step": mean["train"], "wait": 0.0}
    times = timed_run.run(system, servers[system], policy, draws, args.steps, args.folder, WARM_UP)
    return timed_run.means(times)


def sweep(args: argparse.Namespace) -> None:
    found: dict[tuple[str, str], list[dict[str, float]]] = {
        (lengths, name): [] for lengths in args.lengths for name in args.systems
    }
    policy = timed_run.policy_5m(args.folder)
    chosen = [
        systems(lengths, args.micro_batch_tokens, args.dtype)[name] for lengths, name in found
    ]
    with timed_run.servers_for(chosen, policy, args.folder) as servers:
        for repeat in range(args.repeats):
            for (lengths, name), runs in found.items():
                runs.append(measure(args, servers, name, lengths))
                logging.info("repeat %d, %s, %s: %s", repeat, lengths, name, runs[-1])
    for key, runs in found.items():
        parts = {part: records.spread([run[part] for run in runs]) for part in runs[0]}
        records.append(args.out, described(args, *key) | parts | {"command": args.command})


def described(args: argparse.Namespace, lengths: str, name: str) -> dict[str, Any]:
    names = ("steps", "repeats", "micro_batch_tokens", "dtype")
    shared = {name: getattr(args, name) for name in names} | {"warm_up": WARM_UP}
    return {"system": name, "lengths": lengths, "max_lag": MAX_LAG[lengths], **shared}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines, ratios = [], []
    for row in rows:
        least, middle, most = row["step"]
        title = systems(row["lengths"])[row["system"]].title
        rest = [format(row[part][1], form) for part, form in PARTS.items()]
        spread = f"{least:.2f} to {most:.2f}"
        lines.append([row["lengths"], title, f"{middle:.2f}", spread, *rest])
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


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.make_parser("overlap", __doc__)
    parser.add_argument("--repeats", type=int, default=2, help="of every system (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="of a run that count (%(default)s)")
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--micro_batch_tokens", type=int, default=MICRO_BATCH_TOKENS)
    parser.add_argument(
        "--dtype", choices=get_args(Dtype), default="bfloat16", help="of generators (%(default)s)"
    )
    names = list(systems("equal"))
    parser.add_argument("--systems", nargs="+", choices=names, default=names)
    arguments.add_print_only(parser, "overlap")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
        return [described(args, lengths, n) for lengths in args.lengths for n in args.systems]

    if "OMP_NUM_THREADS" in os.environ:
        raise SystemExit("OMP_NUM_THREADS would overrule each system's threads: unset it.")
    return arguments.measure_and_print(make_parser(), argv, sweep, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())
