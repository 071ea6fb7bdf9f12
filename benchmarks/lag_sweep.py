"""How much lag each objective tolerates: the quickstart's task with a growing bound on lag,
objective by objective.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
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

OBJECTIVES: dict[str, dict[str, float]] = {
    "AIPO": {"rho": 4.0},
    "REINFORCE": {},
    "PPO": {"epsilon_low": 0.2, "epsilon_high": 0.2},
    "DecoupledPPO": {"epsilon_low": 0.2, "epsilon_high": 0.2, "max_weight": 5.0},
}
"""Arguments of each objective in `lrl.objectives`."""
SERIES = (
    *("reward", "tokens", "lag_mean", "lag_max", "ess", "clip_fraction", "kl_behaviour"),
    "ratio_max",
)
EVALUATE_EVERY = 10
"""Steps."""
DIVERGED = "the gradient norm is"
"""Part of the policy's error when a step's gradient is not finite."""
SETTINGS: dict[str, Any] = {
    "objectives": (list(OBJECTIVES), "of lrl.objectives", OBJECTIVES),
    "lags": ([0, 1, 2, 4, 8], "of max_lag"),
    "seeds": ([0, 1, 2], "of warm-up, order and torch"),
    **arguments.of_training(lr=2e-4, steps=40),
}


class History(EveryStep):
    """Keeps every step's reward, lag and distance from the policies that wrote its tokens."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def step_done(self, trainer: Any) -> None:
        stream = trainer.datamodule.run.step_stream
        rewards = [rollout.reward for group in stream.groups for rollout in group.scored]
        facts = {"reward": fmean(rewards)} if rewards else {}
        self.steps.append(
            facts | {"tokens": stream.num_tokens} | trainer.lightning_module.diagnostics.result()
        )

    def series(self) -> dict[str, list[float | None]]:
        return {name: [records.rounded(step.get(name)) for step in self.steps] for name in SERIES}


def runs(args: argparse.Namespace) -> Iterator[Row]:
    how = arguments.chosen(args, "lr", "steps", "groups", "responses")
    for seed, lag, objective in product(args.seeds, args.lags, args.objectives):
        settings = RunSettings(seed=seed, max_lag=lag, schedule="constant", **how)
        yield {"objective": objective, "arguments": OBJECTIVES[objective], **asdict(settings)}


def train(server: LentServer, run: Row, folder: Path) -> Row:
    settings = RunSettings.of(run)
    history, evaluation = History(), held_out(EVALUATE_EVERY)
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
        "diverged_at": diverged,
        "evaluations": [
            {"step": step, "accuracy": round(report.reward, 4), "problems": report.n}
            for step, report in evaluation.reports
        ],
        "series": history.series(),
    }


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    for seed in sorted({run["seed"] for run in missing}):
        policy_of(seed)
    with lent_server(policy_of(missing[0]["seed"]), server_settings(), args.folder) as server:
        for run in missing:
            yield train(server, run, args.folder)


def tables(rows: Sequence[Row]) -> str:
    lags = sorted({row["max_lag"] for row in rows})
    found = []
    for title, cell in CELLS.items():
        lines = []
        for objective in dict.fromkeys(row["objective"] for row in rows):
            own = [row for row in rows if row["objective"] == objective]
            places = ([row for row in own if row["max_lag"] == lag] for lag in lags)
            lines.append([objective, *(cell(place) if place else "" for place in places)])
        heads = ["objective", *(f"max_lag {lag}" for lag in lags)]
        found.append(f"{title}:\n\n{records.markdown(heads, lines)}")
    return "\n\n".join(found)


def accuracy_cell(rows: Sequence[Row]) -> str:
    last = [row["evaluations"][-1] for row in rows]
    accuracies = [one["accuracy"] for one in last]
    mean, low, high = records.accuracy_interval(accuracies, last[0]["problems"])
    diverged = sum(row["diverged_at"] is not None for row in rows)
    told = f", {diverged} of {len(rows)} diverged" if diverged else ""
    return f"{mean:.3f} ({low:.3f} to {high:.3f}){told}"


def lag_cell(rows: Sequence[Row]) -> str:
    means, largest = [], 0.0
    for series in (row["series"] for row in rows):
        pairs = zip(series["lag_mean"], series["tokens"], strict=True)
        known = [(lag, tokens) for lag, tokens in pairs if lag is not None]
        tokens = max(1, sum(tokens for _, tokens in known))
        means.append(sum(lag * tokens for lag, tokens in known) / tokens)
        largest = max([largest, *(lag for lag in series["lag_max"] if lag is not None)])
    return f"{fmean(means):.2f} ({largest:.0f})"


def series_cell(rows: Sequence[Row], name: str, worst: Callable[[list[float]], float]) -> str:
    values = [value for row in rows for value in row["series"][name] if value is not None]
    return f"{fmean(values):.3f} ({worst(values):.3f})" if values else ""


CELLS: dict[str, Callable[[Sequence[Row]], str]] = {
    "Final accuracy, mean over seeds (95 % interval)": accuracy_cell,
    "Lag of the trained tokens, mean (largest)": lag_cell,
    "Effective sample size, mean over steps (smallest)": lambda rows: series_cell(rows, "ess", min),
    "Share of clipped tokens, mean over steps (largest)": lambda rows: series_cell(
        rows, "clip_fraction", max
    ),
}
"""Tables by objective and bound on lag, with what each cell says of its runs."""


if __name__ == "__main__":
    arguments.run("lag_sweep", __doc__, SETTINGS, runs, measure, tables)
