"""How far the generator's log-probs are from the trainer's, token by token, and whether that grows
in a long run.

    python -m benchmarks.mismatch                  float32 and bfloat16 generators, 500 steps each
    python -m benchmarks.mismatch --plot-only      draw and print what is there

The quickstart's task with `max_lag: 0`: the weights that write a token also train on it, so a
difference is one between two programs and number formats. The trainer computes in float32
throughout.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

import lrl
from benchmarks import arguments, records
from benchmarks.intervals import slope
from benchmarks.lent_server import lent_server
from benchmarks.quickstart_run import (
    RunSettings,
    held_out,
    make_data,
    make_module,
    make_trainer,
    policy_of,
    server_settings,
)
from lrl.types import MicroBatch

DTYPES = ("float32", "bfloat16")
QUANTILES = {"q50": 0.5, "q99": 0.99, "q999": 0.999}
HEAD = (
    "| generator | steps | tokens | mean | standard deviation | 50 % | 99 % | "
    "99.9 % | largest | KL | slope of the standard deviation per 100 steps | "
    "accuracy |\n" + "|---" * 12 + "|"
)


class Watched(lrl.PolicyModule):
    """A policy that keeps the difference between its log-prob and the behaviour log-prob of every
    trained token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.differences: list[Tensor] = []
        """Of the current step: float32 [n], nats, one tensor a micro-batch."""

    def forward(self, micro: MicroBatch) -> Tensor:
        """See `PolicyModule.forward`."""
        self.logprobs = super().forward(micro)
        return self.logprobs

    def compute_loss(self, micro: MicroBatch) -> Tensor:
        """See `PolicyModule.compute_loss`."""
        loss = super().compute_loss(micro)
        self.differences.append((self.logprobs.detach() - micro.behaviour_logprobs)[micro.mask])
        return loss


class Watch(L.Callback):
    """Sums up the differences of every step, and keeps them all for the sum over the run."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.all: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Takes the step's differences from the policy."""
        step = torch.cat(pl_module.differences)
        pl_module.differences.clear()
        self.steps.append(summary(step))
        self.all.append(step)


def summary(differences: Tensor) -> dict[str, float]:
    """Returns, of log pi - log mu, [n] in nats: mean and spread; quantiles and maximum of its size;
    KL(mu || pi) by k3.

    In float64: near 0 the three terms of k3 nearly cancel.
    """
    values = differences.double().numpy()
    size = np.abs(values)
    return {
        "tokens": len(values),
        "mean": float(values.mean()),
        "std": float(values.std()),
        **{name: float(np.quantile(size, share)) for name, share in QUANTILES.items()},
        "max": float(size.max()),
        "kl": float((np.expm1(values) - values).mean()),
    }


def measure(dtype: str, settings: RunSettings, folder: Path) -> dict[str, Any]:
    """Makes one long run with a generator of that format."""
    watch = Watch()
    evaluation = held_out(settings.steps)
    folder = folder / dtype
    policy = make_module(settings, lrl.objectives.AIPO(), Watched)
    started = time.monotonic()
    with lent_server(policy_of(settings.seed), server_settings(dtype), folder) as server:
        make_trainer(server, settings, [evaluation, watch], folder).fit(policy, make_data(settings))
    return {
        "dtype": dtype,
        **asdict(settings),
        "seconds": round(time.monotonic() - started, 1),
        "accuracy": [round(report.accuracy, 4) for _, report in evaluation.reports],
        "whole": summary(torch.cat(watch.all)),
        "series": {
            name: [records.rounded(step[name]) for step in watch.steps] for name in watch.steps[0]
        },
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown: one line for each format, nats throughout."""
    return "\n".join([HEAD, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    whole = row["whole"]
    rise, half = slope(row["series"]["std"])
    numbers = [f"{whole[name]:.2g}" for name in ("mean", "std", *QUANTILES, "max", "kl")]
    before, after = row["accuracy"][0], row["accuracy"][-1]
    cells = [
        row["dtype"],
        f"{row['steps']}",
        f"{whole['tokens']:,}",
        *numbers,
        f"{100 * rise:.2g} ± {100 * half:.2g}",
        f"{before:.3f} to {after:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws sizes of the differences over steps on the left, KL on the right, both on a logarithmic
    axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = {"max": ":", "q99": "--", "q50": "-"}
    names = {"max": "largest", "q99": "99 %", "q50": "50 %"}
    for number, row in enumerate(rows):
        steps = range(1, len(row["series"]["kl"]) + 1)
        for name, style in styles.items():
            label = f"{row['dtype']}, {names[name]}"
            left.plot(
                steps, row["series"][name], style, color=f"C{number}", linewidth=0.8, label=label
            )
        right.plot(
            steps, row["series"]["kl"], color=f"C{number}", linewidth=0.8, label=row["dtype"]
        )
    for axes, title in (
        (left, "|log pi - log mu| of a step's tokens (nats)"),
        (right, "KL(mu || pi) per token (nats)"),
    ):
        axes.set(title=title, xlabel="optimizer steps", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mismatch",
        description="Log-probs of generator and trainer, compared.",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of the generator"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments.add_training(parser, lr=1e-4, steps=500)
    arguments.add_places(parser, "mismatch")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the formats that are missing, then draws the plot and prints the table."""
    args = arguments.parse(make_parser(), argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings = RunSettings(
        seed=args.seed, max_lag=0, lr=args.lr, schedule=(
            "linear"
        ), steps=args.steps, groups=args.groups,
        responses=args.responses,
    )  # fmt: skip
    rows = []
    for dtype in args.dtypes:
        row = records.find(records.read(args.out), {"dtype": dtype, **asdict(settings)})
        if row is None and not args.plot_only:
            row = measure(dtype, settings, args.folder)
            records.append(args.out, row | {"command": args.command})
        if row is not None:
            rows.append(row)
    if not rows:
        raise SystemExit(f"{args.out} has no run with these settings.")
    draw(rows, args.plot)
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
