"""How much lag each objective tolerates: the quickstart's task with a growing bound on lag,
objective by objective.

    python -m benchmarks.lag_sweep                  run what is missing, then print
    python -m benchmarks.lag_sweep --print-only     print what is there

All runs use one vLLM server, one after another. Each appends a line to `--out` when it is done, and
a run whose line is there is not repeated: the sweep can be stopped at any time and continues later.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.intervals import accuracy_interval, half_width
from benchmarks.quickstart_run import (
    RunSettings,
    held_out,
    make_data,
    make_module,
    make_trainer,
    policy_of,
    server_settings,
)
from benchmarks.runs import EveryStep, LentServer, lent_server
from lrl.callbacks.base import find
from lrl.callbacks.throughput import Throughput
from lrl.callbacks.weight_sync import WeightSync
from lrl.training.schedule import Schedule

OBJECTIVES: dict[str, dict[str, float]] = {
    "AIPO": {"rho": 4.0},
    "REINFORCE": {},
    "PPO": {"epsilon_low": 0.2, "epsilon_high": 0.2},
    "DecoupledPPO": {"epsilon_low": 0.2, "epsilon_high": 0.2, "max_weight": 5.0},
}
"""Arguments of each objective in `lrl.objectives`."""
SERIES = ("reward", "tokens", "lag_mean", "lag_max", "ess", "clip_fraction", "kl_behaviour")
SERIES += ("ratio_max",)
BY_LAG = ("share", "contribution", "ess", "clip_fraction", "kl_behaviour")
GOAL = 0.8
DIVERGED = "the gradient norm is"
"""Part of the policy's error when a step's gradient is not finite."""


class History(EveryStep):
    """Keeps every step's reward, lag and distance from the policies that wrote its tokens."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.probe_difference = 0.0
        """Largest difference of a proof so far, in nats."""
        self.wait_s = 0.0
        """Seconds that the trainer waited for rollouts."""

    def step_done(self, trainer: Any) -> None:
        stream = trainer.datamodule.run.step_stream
        rewards = [rollout.reward for group in stream.groups for rollout in group.scored]
        facts = {"reward": fmean(rewards)} if rewards else {}
        self.steps.append(
            facts | {"tokens": stream.num_tokens} | trainer.lightning_module.diagnostics.result()
        )
        throughput = find(trainer, Throughput)
        self.wait_s += throughput.times.wait if throughput else 0.0
        sync = find(trainer, WeightSync)
        if sync is not None and sync.proof is not None:
            self.probe_difference = max(self.probe_difference, sync.proof.difference)

    def series(self) -> dict[str, list[float | None]]:
        return {name: [records.rounded(step.get(name)) for step in self.steps] for name in SERIES}

    def by_lag(self) -> dict[str, dict[str, float | None]]:
        found: dict[str, dict[str, float | None]] = {}
        names = {name for step in self.steps for name in step if name.startswith("by_lag/")}
        for lag in sorted({int(name.split("/")[1]) for name in names}):
            steps = [step for step in self.steps if f"by_lag/{lag}/share" in step]
            means = {name: fmean(step[f"by_lag/{lag}/{name}"] for step in steps) for name in BY_LAG}
            found[str(lag)] = {name: records.rounded(mean) for name, mean in means.items()}
        return found


def runs(args: argparse.Namespace) -> Iterator[Row]:
    how = arguments.chosen(args, "lr", "schedule", "steps", "groups", "responses")
    for seed, lag, objective in product(args.seeds, args.lags, args.objectives):
        settings = RunSettings(seed=seed, max_lag=lag, **how)
        yield {"objective": objective, "arguments": OBJECTIVES[objective], **asdict(settings)}


def train(server: LentServer, run: Row, folder: Path, every: int) -> Row:
    settings = RunSettings(**{one.name: run[one.name] for one in fields(RunSettings)})
    history, evaluation = History(), held_out(every)
    name = f"{run['objective']}-lag{settings.max_lag}-seed{settings.seed}"
    trainer = make_trainer(server, settings, [evaluation, history], folder / name)
    objective = getattr(lrl.objectives, run["objective"])(**run["arguments"])
    started, diverged = time.monotonic(), None
    try:
        trainer.fit(make_module(settings, objective), make_data(settings))
    except RuntimeError as error:
        if DIVERGED not in str(error):
            raise
        diverged = trainer.global_step
    return {
        **run,
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


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    for seed in sorted({run["seed"] for run in missing}):
        policy_of(seed)
    with lent_server(policy_of(missing[0]["seed"]), server_settings(), args.folder) as server:
        for run in missing:
            yield train(server, run, args.folder, args.evaluate_every)


def steps_to(row: Row, goal: float = GOAL) -> int | None:
    return next((found["step"] for found in row["evaluations"] if found["accuracy"] >= goal), None)


def final(row: Row) -> float:
    return row["evaluations"][-1]["accuracy"]


def seen_lag(row: Row) -> float:
    pairs = zip(row["series"]["lag_mean"], row["series"]["tokens"], strict=True)
    known = [(lag, tokens) for lag, tokens in pairs if lag is not None]
    return sum(lag * tokens for lag, tokens in known) / max(1, sum(tokens for _, tokens in known))


def tables(rows: Sequence[Row]) -> str:
    sections: dict[str, Callable[[Sequence[Row]], str]] = {
        "Final accuracy, mean over seeds (95 % interval)": accuracy_cell,
        f"Steps to accuracy {GOAL} (responses trained until then), mean over the seeds "
        "that reached it": goal_cell,
        "Lag of the trained tokens, mean (largest)": lag_cell,
        "Effective sample size, mean over steps (smallest step)": lambda cell: series_cell(
            cell, "ess", min
        ),
        "Share of clipped tokens, mean over steps (largest step)": lambda cell: series_cell(
            cell, "clip_fraction", max
        ),
    }
    sections[
        "Final accuracy less that of the same seed at the smallest max_lag (95 % interval)"
    ] = paired_with(rows)
    return "\n\n".join(f"{title}:\n\n{table(rows, cell)}" for title, cell in sections.items())


def table(rows: Sequence[Row], cell: Callable[[Sequence[Row]], str]) -> str:
    lags = sorted({row["max_lag"] for row in rows})
    lines = []
    for objective in dict.fromkeys(row["objective"] for row in rows):
        places = [chosen(rows, objective, lag) for lag in lags]
        lines.append([objective, *(cell(place) if place else "" for place in places)])
    return records.markdown(["objective", *(f"max_lag {lag}" for lag in lags)], lines)


def chosen(rows: Sequence[Row], objective: str, lag: int) -> list[Row]:
    return [row for row in rows if row["objective"] == objective and row["max_lag"] == lag]


def accuracy_cell(cell: Sequence[Row]) -> str:
    mean, low, high = accuracy_interval(
        [final(row) for row in cell], cell[0]["evaluations"][-1]["problems"]
    )
    diverged = sum(row["diverged_at"] is not None for row in cell)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})" + (
        f", {diverged} of {len(cell)} diverged" if diverged else ""
    )


def goal_cell(cell: Sequence[Row]) -> str:
    steps = [found for row in cell if (found := steps_to(row)) is not None]
    if not steps:
        return f"0 of {len(cell)}"
    responses = fmean(steps) * cell[0]["groups"] * cell[0]["responses"]
    return f"{fmean(steps):.0f} ({responses:,.0f})" + (
        f", {len(steps)} of {len(cell)}" if len(steps) < len(cell) else ""
    )


def lag_cell(cell: Sequence[Row]) -> str:
    largest = max(
        (lag for row in cell for lag in row["series"]["lag_max"] if lag is not None), default=0.0
    )
    return f"{fmean(map(seen_lag, cell)):.2f} ({largest:.0f})"


def paired_with(rows: Sequence[Row]) -> Callable[[Sequence[Row]], str]:
    """Returns a cell function that compares each run with the run of its seed and objective at the
    smallest lag.

    Seeds differ more from each other than lags do: the differences within a seed have the narrower
    interval.
    """
    base = min(row["max_lag"] for row in rows)
    begun = {(row["objective"], row["seed"]): final(row) for row in rows if row["max_lag"] == base}

    def cell(place: Sequence[Row]) -> str:
        keys = [(row["objective"], row["seed"]) for row in place]
        known = [
            final(row) - begun[key] for row, key in zip(place, keys, strict=True) if key in begun
        ]
        if place[0]["max_lag"] == base or len(known) < 2:
            return ""
        return f"{fmean(known):+.3f} (± {half_width(known):.3f})"

    return cell


def series_cell(cell: Sequence[Row], name: str, worst: Callable[[list[float]], float]) -> str:
    values = [value for row in cell for value in row["series"][name] if value is not None]
    if not values:
        return ""
    return f"{fmean(values):.3f} ({worst(values):.3f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.make_parser("lag_sweep", __doc__)
    arguments.add(
        parser,
        objectives=(list(OBJECTIVES), "of lrl.objectives", OBJECTIVES),
        lags=([0, 1, 2, 4, 8], "of max_lag"),
        seeds=([0, 1, 2], "of warm-up, order and torch"),
        schedule=("constant", "of the learning rate", get_args(Schedule)),
        evaluate_every=(10, "steps between evaluations"),
    )
    arguments.add_training(parser, lr=2e-4, steps=40)
    arguments.add_places(parser, "lag_sweep")
    return arguments.run(parser, argv, runs, measure, tables)


if __name__ == "__main__":
    raise SystemExit(main())
