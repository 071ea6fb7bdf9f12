"""The measured rows as a Markdown table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.against_trl.settings import SYSTEMS
from benchmarks.intervals import accuracy_interval
from lrl.quickstart.task import TEST_ROWS

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Returns a Markdown table: accuracy at each measured step, seconds of training and starting;
    means over seeds."""
    steps = sorted({row["step"] for row in rows})
    heads = [
        "system",
        "seeds",
        *(f"step {step}" for step in steps[:-1]),
        f"step {steps[-1]} (95 % interval)",
    ]
    heads += ["training (s)", "one step (s)", "start (s)"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for system, name in SYSTEMS.items():
        if of := [row for row in rows if row["system"] == system]:
            lines.append(f"| {' | '.join([name, *_cells(of, steps)])} |")
    return "\n".join(lines)


def _cells(rows: Sequence[Row], steps: Sequence[int]) -> list[str]:
    """Returns one system's cells."""
    at = {step: [row for row in rows if row["step"] == step] for step in steps}
    last = at[steps[-1]]
    mean, low, high = accuracy_interval(_column(last, "accuracy"), TEST_ROWS)
    seconds = fmean(_column(last, "seconds"))
    return [
        str(len(last)),
        *(f"{fmean(_column(at[step], 'accuracy')):.3f}" for step in steps[:-1]),
        f"{mean:.3f} ({low:.3f} to {high:.3f})",
        f"{seconds:.0f}",
        f"{seconds / max(1, steps[-1]):.2f}",
        f"{fmean(_column(last, 'start_s')):.0f}",
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws accuracy over samples and over seconds: the mean over seeds, and each seed thin behind
    it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, horizontal in zip(panels, ("samples", "seconds"), strict=True):
        for number, (system, name) in enumerate(SYSTEMS.items()):
            if of := [row for row in rows if row["system"] == system]:
                _draw_system(axes, of, horizontal, f"C{number}", name)
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.3)
    panels[0].set(xlabel="samples trained", ylabel="greedy accuracy, 500 held-out problems")
    panels[1].set(xlabel="seconds of training, start-up left out")
    panels[1].legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_system(axes: Any, rows: Sequence[Row], horizontal: str, color: str, name: str) -> None:
    for seed in sorted({row["seed"] for row in rows}):
        of = sorted((row for row in rows if row["seed"] == seed), key=lambda row: row["step"])
        axes.plot(
            _column(of, horizontal), _column(of, "accuracy"), color=color, linewidth=0.7, alpha=0.4
        )
    steps = sorted({row["step"] for row in rows})
    at = [[row for row in rows if row["step"] == step] for step in steps]
    axes.plot(
        [fmean(_column(of, horizontal)) for of in at],
        [fmean(_column(of, "accuracy")) for of in at],
        color=color,
        marker="o",
        label=name,
    )


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows]
