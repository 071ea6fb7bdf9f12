"""How much lag each objective tolerates: the quickstart's task with a growing bound on lag,
objective by objective.

    python -m benchmarks.lag_sweep                 run what is missing, then draw and print
    python -m benchmarks.lag_sweep --plot-only     draw and print what is there

All runs use one vLLM server, one after another. Each appends a line to `--out` when it is done, and
a run whose line is there is not repeated: the sweep can be stopped at any time and continues later.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L

import lrl
from benchmarks import arguments, records
from benchmarks.lag_report import draw, tables
from benchmarks.lent_server import LentServer, lent_server
from benchmarks.quickstart_run import (
    RunSettings,
    held_out,
    make_data,
    make_module,
    make_trainer,
    policy_of,
    server_settings,
)
from lrl.callbacks.base import find
from lrl.callbacks.throughput import Throughput
from lrl.callbacks.weight_sync import WeightSync

OBJECTIVES: dict[str, dict[str, float]] = {
    "AIPO": {"rho": 4.0},
    "REINFORCE": {},
    "PPO": {"epsilon_low": 0.2, "epsilon_high": 0.2},
    "DecoupledPPO": {"epsilon_low": 0.2, "epsilon_high": 0.2, "max_weight": 5.0},
}
"""Arguments of each objective in `lrl.objectives`."""
ORDERS = {"seeds": ("seed", "max_lag", "objective"), "objectives": ("objective", "max_lag", "seed")}
"""Orders of the runs, slowest first. With the seeds outermost, early rows already cover the whole
table."""
SERIES = (
    "reward",
    "tokens",
    "lag_mean",
    "lag_max",
    "ess",
    "clip_fraction",
    "kl_behaviour",
    "ratio_max",
)
BY_LAG = ("share", "contribution", "ess", "clip_fraction", "kl_behaviour")
DIVERGED = "the gradient norm is"
"""Part of the policy's error when a step's gradient is not finite."""


class History(L.Callback):
    """Keeps every step's reward, lag and distance from the policies that wrote its tokens."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.probe_difference = 0.0
        """Largest difference of a probe so far, in nats."""
        self.wait_s = 0.0
        """Seconds that the trainer waited for rollouts."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Keeps the figures of the step that has just ended."""
        stream = trainer.datamodule.step_stream  # type: ignore[attr-defined]
        rewards = [rollout.reward for group in stream.groups for rollout in group.scored]
        facts = {"reward": fmean(rewards)} if rewards else {}
        self.steps.append(facts | {"tokens": stream.num_tokens} | pl_module.diagnostics.result())
        throughput = find(trainer, Throughput)
        self.wait_s += throughput.times.wait if throughput else 0.0
        sync = find(trainer, WeightSync)
        self.probe_difference = max(self.probe_difference, sync.probes.difference if sync else 0.0)

    def series(self) -> dict[str, list[float | None]]:
        """Returns each number of `SERIES` by step; None for a step without one."""
        return {name: [records.rounded(step.get(name)) for step in self.steps] for name in SERIES}

    def by_lag(self) -> dict[str, dict[str, float | None]]:
        """Returns for every lag the numbers of `BY_LAG`, each the mean over the steps with tokens
        of that lag."""
        found: dict[str, dict[str, float | None]] = {}
        names = {name for step in self.steps for name in step if name.startswith("by_lag/")}
        for lag in sorted({int(name.split("/")[1]) for name in names}):
            steps = [step for step in self.steps if f"by_lag/{lag}/share" in step]
            means = {name: fmean(step[f"by_lag/{lag}/{name}"] for step in steps) for name in BY_LAG}
            found[str(lag)] = {name: records.rounded(mean) for name, mean in means.items()}
        return found


def wanted(args: argparse.Namespace) -> Iterator[tuple[str, RunSettings]]:
    """Yields the runs of the table, in the requested order."""
    values = {"seed": args.seeds, "max_lag": args.lags, "objective": args.objectives}
    order = ORDERS[args.order]
    for combination in product(*(values[name] for name in order)):
        chosen = dict(zip(order, combination, strict=True))
        objective = chosen.pop("objective")
        yield (
            objective,
            RunSettings(
                lr=args.lr,
                schedule=args.schedule,
                steps=args.steps,
                groups=args.groups,
                responses=args.responses,
                **chosen,
            ),
        )


def described(objective: str, settings: RunSettings) -> dict[str, Any]:
    """Returns the fields by which a run's record is found."""
    return {"objective": objective, "arguments": OBJECTIVES[objective], **asdict(settings)}


def measure(
    server: LentServer, objective: str, settings: RunSettings, folder: Path, every: int
) -> dict[str, Any]:
    """Makes one run and its record, also for a run that diverges."""
    history = History()
    evaluation = held_out(every)
    run_folder = folder / f"{objective}-lag{settings.max_lag}-seed{settings.seed}"
    trainer = make_trainer(server, settings, [evaluation, history], run_folder)
    policy = make_module(settings, getattr(lrl.objectives, objective)(**OBJECTIVES[objective]))
    started, diverged = time.monotonic(), None
    try:
        trainer.fit(policy, make_data(settings))
    except RuntimeError as error:
        if DIVERGED not in str(error):
            raise
        diverged = trainer.global_step
    return {
        **described(objective, settings),
        "seconds": round(time.monotonic() - started, 1),
        "wait_seconds": round(history.wait_s, 1),
        "evaluation_seconds": round(evaluation.seconds, 1),
        "diverged_at": diverged,
        "evaluations": [
            {
                "step": step,
                "accuracy": round(report.accuracy, 4),
                "problems": report.n,
                "versions": report.versions,
            }
            for step, report in evaluation.reports
        ],
        "series": history.series(),
        "by_lag": history.by_lag(),
        "probe_difference": records.rounded(history.probe_difference),
    }


def sweep(args: argparse.Namespace) -> None:
    """Runs what is missing."""
    found = records.read(args.out)
    missing = [run for run in wanted(args) if records.find(found, described(*run)) is None]
    logging.info("%d runs are missing", len(missing))
    if not missing:
        return
    for seed in sorted({settings.seed for _, settings in missing}):
        policy_of(seed)
    with lent_server(policy_of(missing[0][1].seed), server_settings(), args.folder) as server:
        for number, (objective, settings) in enumerate(missing, 1):
            record = measure(server, objective, settings, args.folder, args.evaluate_every)
            records.append(args.out, record | {"command": args.command})
            logging.info(
                "%d/%d %s lag %d seed %d: accuracy %.3f, %.0f s%s",
                number,
                len(missing),
                objective,
                settings.max_lag,
                settings.seed,
                record["evaluations"][-1]["accuracy"],
                record["seconds"],
                ""
                if record["diverged_at"] is None
                else f", diverged at step {record['diverged_at']}",
            )


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lag_sweep", description="How much lag each objective bears."
    )
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument(
        "--lags",
        nargs="+",
        type=int,
        default=[0, 1, 2, 4, 8],
        help="values of max_lag (%(default)s)",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--schedule", choices=["constant", "linear", "cosine"], default="constant")
    arguments.add_training(parser, lr=2e-4, steps=40)
    parser.add_argument(
        "--evaluate-every", type=int, default=10, help="steps between evaluations (%(default)s)"
    )
    parser.add_argument(
        "--order", choices=ORDERS, default="seeds", help="what changes most slowly (%(default)s)"
    )
    arguments.add_places(parser, "lag_sweep")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, then draws the plot and prints the tables of all runs with these
    settings."""
    args = arguments.parse(make_parser(), argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not args.plot_only:
        sweep(args)
    found = records.read(args.out)
    rows = [
        row for run in wanted(args) if (row := records.find(found, described(*run))) is not None
    ]
    if not rows:
        raise SystemExit(f"{args.out} has no run with these settings.")
    draw(rows, args.plot)
    print(tables(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
