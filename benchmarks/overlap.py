"""How well generation and training overlap: a step's seconds beside those of either side alone, on
the same machine.

    python -m benchmarks.overlap                                  measure, draw and print
    python -m benchmarks.overlap --repeats 1 --steps 2            a rehearsal
    python -m benchmarks.overlap --plot-only                      draw and print what is there

A policy of 5 million random weights, 8 prompts x 16 responses a step, all responses of 64 tokens or
long-tailed (`benchmarks.timed_run`). It is trained in float32 and written with in bfloat16, as in
lrl's recipes, or in `--dtype`. The five systems alternate in each repeat:

- asynchronous: half of the threads write, half train, and the bound on lag is wide enough for the
  longest response (`MAX_LAG`): one of 512 tokens takes the engine five or six steps of the trainer.
- writing alone: the same run, but the trainer only takes the responses: no forward pass, no update,
  no sync but the first one. So as many responses are in flight as in the asynchronous run. A run at
  lag 0 would not do: at the end of every step's batch a few long responses are written alone, which
  steady writing never sees.
- training alone: the same training on responses that are there already, with the asynchronous run's
  threads. No sync.
- both alone, at once: the two before it, each in a process of its own (`benchmarks.at_once`).
  Nothing goes between them but the pace, so this is what the machine makes of two sides that have
  nothing to do with each other.
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
from pathlib import Path
from statistics import fmean, median
from typing import Any, get_args

from benchmarks import arguments, records, timed_run
from benchmarks.at_once import both_at_once
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
HEAD = "| lengths | system | step (s) | spread | waits (s) | sync (s) | pause (s) | on a core (s) |"


def systems(
    lengths: str, micro_batch_tokens: int = MICRO_BATCH_TOKENS, dtype: Dtype = "bfloat16"
) -> dict[str, System]:
    """Returns the systems to compare at these lengths, by their names in the records; `training`
    has no server."""
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
        "at_once": System(title="both alone, at once", max_lag=max_lag, **halves),
        "synchronous": System(
            title="synchronous, all cores", max_lag=0, placement="shared", **whole
        ),
    }


def measure(
    args: argparse.Namespace, servers: dict[System, LentServer], name: str, lengths: str
) -> dict[str, float]:
    """Returns the mean seconds a step of one system, and their parts."""
    system = systems(lengths, args.micro_batch_tokens, args.dtype)[name]
    draws = LENGTHS[lengths]
    policy = timed_run.policy_5m(args.folder)
    if name == "training":
        times = train_alone(system, policy, draws, WARM_UP + args.steps, args.folder)
        mean = timed_run.means(times[WARM_UP:])
        return mean | {"step": mean["train"], "wait": 0.0}
    server = servers[system]
    if name == "at_once":
        seconds, trained = both_at_once(
            system, server, policy, draws, args.steps, args.folder, WARM_UP
        )
        return timed_run.means(trained) | {"step": fmean(seconds), "wait": 0.0}
    return timed_run.means(
        timed_run.run(system, server, policy, draws, args.steps, args.folder, WARM_UP)
    )


def sweep(args: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Makes the runs of every system and lengths: repeats outermost."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {
        (ls, name): [] for ls in args.lengths for name in args.systems
    }
    policy = timed_run.policy_5m(args.folder)
    chosen = [
        systems(lengths, args.micro_batch_tokens, args.dtype)[name] for lengths, name in found
    ]
    with timed_run.servers_for(chosen, policy, args.folder) as servers:
        for repeat in range(args.repeats):
            for lengths, name in found:
                run = measure(args, servers, name, lengths)
                found[lengths, name].append(run)
                logging.info("repeat %d, %s, %s: %s", repeat, lengths, name, timed_run.told(run))
    return found


def described(args: argparse.Namespace, lengths: str, name: str) -> dict[str, Any]:
    """Returns the fields by which a record is found."""
    shared: dict[str, Any] = {"steps": args.steps, "repeats": args.repeats, "warm_up": WARM_UP}
    shared |= {"micro_batch_tokens": args.micro_batch_tokens, "dtype": args.dtype}
    return {"system": name, "lengths": lengths, "max_lag": MAX_LAG[lengths], **shared}


def record(
    args: argparse.Namespace, lengths: str, name: str, runs: list[dict[str, float]]
) -> dict[str, Any]:
    """Returns the record of one system at one kind of lengths: least, median and most of the
    repeats."""
    parts = {part: spread([run[part] for run in runs]) for part in runs[0]}
    return described(args, lengths, name) | parts


def spread(values: Sequence[float]) -> list[float | None]:
    """Returns least, median and most."""
    return [records.rounded(value) for value in (min(values), median(values), max(values))]


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Returns the table in Markdown, and below it the ratios."""
    lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    for (lengths, name), row in rows.items():
        least, middle, most = row["step"]
        rest = [format(row[part][1], form) for part, form in PARTS.items()]
        cells = [
            lengths,
            systems(lengths)[name].title,
            f"{middle:.2f}",
            f"{least:.2f} to {most:.2f}",
            *rest,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for lengths in dict.fromkeys(lengths for lengths, _ in rows):
        step = {name: row["step"][1] for (of, name), row in rows.items() if of == lengths}
        if {"asynchronous", *ALONE} <= set(step):
            larger = max(step[name] for name in ALONE)
            told = f"{step['asynchronous'] / larger:.2f} times the larger of both alone"
            if "at_once" in step:
                told += (
                    f" and {step['asynchronous'] / step['at_once']:.2f} times that of both alone "
                    "at once"
                )
            if "synchronous" in step:
                times = step["synchronous"] / step["asynchronous"]
                told += f", and is {times:.2f} times as fast as lrl's synchronous one on all cores"
            lines.append(f"\n{lengths}: an asynchronous step takes {told}.")
    return "\n".join(lines)


def draw(rows: dict[tuple[str, str], dict[str, Any]], path: Path) -> None:
    """Draws a bar for each system, grouped by lengths; the line on it is the spread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    kinds = list(dict.fromkeys(lengths for lengths, _ in rows))
    names = [name for name in systems(kinds[0]) if any(of == name for _, of in rows)]
    for number, name in enumerate(names):
        at = [
            (kind, rows[lengths, name]["step"])
            for kind, lengths in enumerate(kinds)
            if (lengths, name) in rows
        ]
        places = [kind + (number - (len(names) - 1) / 2) * 0.8 / len(names) for kind, _ in at]
        middles = [step[1] for _, step in at]
        errors = [[step[1] - step[0] for _, step in at], [step[2] - step[1] for _, step in at]]
        label = systems(kinds[0])[name].title
        axes.bar(
            places,
            middles,
            0.75 / len(names),
            yerr=errors,
            capsize=3,
            color=f"C{number}",
            label=label,
        )
    axes.set_xticks(range(len(kinds)), [f"{kind} responses" for kind in kinds])
    axes.set_ylabel("seconds a step of 128 responses")
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--repeats", type=int, default=2, help="of every system (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="of a run that count (%(default)s)")
    parser.add_argument(
        "--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS), help="(%(default)s)"
    )
    parser.add_argument(
        "--micro_batch_tokens",
        type=int,
        default=MICRO_BATCH_TOKENS,
        help="of one forward pass (%(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        default="bfloat16",
        help="of the generators; training is float32 (%(default)s)",
    )
    names = list(systems("equal"))
    parser.add_argument("--systems", nargs="+", choices=names, default=names, help="(%(default)s)")
    arguments.add_places(parser, "overlap")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, unless it only draws; then draws and prints."""
    args = arguments.parse(make_parser(), argv)
    if "OMP_NUM_THREADS" in os.environ:
        raise SystemExit(
            "OMP_NUM_THREADS is set and would overrule each system's threads: unset it."
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not args.plot_only:
        for (lengths, name), runs in sweep(args).items():
            records.append(args.out, record(args, lengths, name, runs) | {"command": args.command})
    made = records.read(args.out)
    wanted = {(ls, name): described(args, ls, name) for ls in args.lengths for name in args.systems}
    rows = {
        key: row
        for key, settings in wanted.items()
        if (row := records.find(made, settings)) is not None
    }
    if not rows:
        raise SystemExit(
            f"{args.out} has no measurement with these settings; leave out --plot-only to measure."
        )
    draw(rows, args.plot)
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
