"""The runs of `benchmarks.lag_sweep` as tables and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.intervals import accuracy_interval, half_width

Row = dict[str, Any]
GOAL = 0.8
COLUMNS = 3
"""Panels side by side."""


def steps_to(row: Row, goal: float = GOAL) -> int | None:
    """Returns the steps at the first evaluation that reached `goal`, or None."""
    return next((found["step"] for found in row["evaluations"] if found["accuracy"] >= goal), None)


def final(row: Row) -> float:
    """Returns the accuracy at the last evaluation; for a run that diverged, the last one before."""
    return row["evaluations"][-1]["accuracy"]


def seen_lag(row: Row) -> float:
    """Returns the mean lag of all trained tokens, in versions."""
    pairs = zip(row["series"]["lag_mean"], row["series"]["tokens"], strict=True)
    known = [(lag, tokens) for lag, tokens in pairs if lag is not None]
    return sum(lag * tokens for lag, tokens in known) / max(1, sum(tokens for _, tokens in known))


def tables(rows: Sequence[Row]) -> str:
    """Returns the tables in Markdown: final accuracy, the cost of the goal, and lag and distance on
    the way."""
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
    """Returns a table with objectives down and lags across; `cell` sums up the runs of one cell."""
    lags = sorted({row["max_lag"] for row in rows})
    lines = [
        "| objective | " + " | ".join(f"max_lag {lag}" for lag in lags) + " |",
        "|---" * (len(lags) + 1) + "|",
    ]
    for objective in dict.fromkeys(row["objective"] for row in rows):
        places = [chosen(rows, objective, lag) for lag in lags]
        lines.append(
            f"| {objective} | "
            + " | ".join(cell(place) if place else "" for place in places)
            + " |"
        )
    return "\n".join(lines)


def chosen(rows: Sequence[Row], objective: str, lag: int) -> list[Row]:
    """Returns the runs of one cell of the table."""
    return [row for row in rows if row["objective"] == objective and row["max_lag"] == lag]


def accuracy_cell(cell: Sequence[Row]) -> str:
    """Returns mean and interval, and how many runs diverged."""
    mean, low, high = accuracy_interval(
        [final(row) for row in cell], cell[0]["evaluations"][-1]["problems"]
    )
    diverged = sum(row["diverged_at"] is not None for row in cell)
    return f"{mean:.3f} ({low:.3f} to {high:.3f})" + (
        f", {diverged} of {len(cell)} diverged" if diverged else ""
    )


def goal_cell(cell: Sequence[Row]) -> str:
    """Returns mean steps and responses, and how many seeds reached the goal, if not all."""
    steps = [found for row in cell if (found := steps_to(row)) is not None]
    if not steps:
        return f"0 of {len(cell)}"
    responses = fmean(steps) * cell[0]["groups"] * cell[0]["responses"]
    return f"{fmean(steps):.0f} ({responses:,.0f})" + (
        f", {len(steps)} of {len(cell)}" if len(steps) < len(cell) else ""
    )


def lag_cell(cell: Sequence[Row]) -> str:
    """Returns the mean lag over tokens and seeds, and the largest of all."""
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
    """Returns the mean over steps and seeds of a series, and its worst step."""
    values = [value for row in cell for value in row["series"][name] if value is not None]
    if not values:
        return ""
    return f"{fmean(values):.3f} ({worst(values):.3f})"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws one panel of accuracy over steps for each lag, and one of final accuracy over lags."""
    from matplotlib.figure import Figure

    lags = sorted({row["max_lag"] for row in rows})
    objectives = list(dict.fromkeys(row["objective"] for row in rows))
    height = -(-(len(lags) + 1) // COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 3.2 * height), layout="constrained")
    panels = figure.subplots(height, COLUMNS, sharey=True, squeeze=False).flatten()
    for axes, lag in zip(panels, lags, strict=False):
        for number, objective in enumerate(objectives):
            if cell := chosen(rows, objective, lag):
                _draw_curves(axes, cell, f"C{number}")
        axes.set(title=f"max_lag {lag}", xlabel="optimizer steps")
    for number, objective in enumerate(objectives):
        _draw_final(panels[len(lags)], rows, lags, objective, number, len(objectives))
    panels[len(lags)].set(
        title="last evaluation", xlabel="max_lag", xticks=range(len(lags)), xticklabels=lags
    )
    for axes in panels[: len(lags) + 1]:
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.3)
    for axes in panels[len(lags) + 1 :]:
        axes.set_axis_off()
    for axes in panels[::COLUMNS]:
        axes.set_ylabel("greedy accuracy")
    panels[len(lags)].legend(fontsize="small", loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_curves(axes: Any, cell: Sequence[Row], color: str) -> None:
    """Draws the mean over seeds with the band from lowest to highest, at each step over the
    evaluated seeds."""
    by_step: dict[int, list[float]] = {}
    for row in cell:
        for found in row["evaluations"]:
            by_step.setdefault(found["step"], []).append(found["accuracy"])
    steps = sorted(by_step)
    axes.plot(steps, [fmean(by_step[step]) for step in steps], color=color, marker=".")
    axes.fill_between(
        steps,
        [min(by_step[s]) for s in steps],
        [max(by_step[s]) for s in steps],
        color=color,
        alpha=0.15,
        linewidth=0,
    )


def _draw_final(
    axes: Any,
    rows: Sequence[Row],
    lags: Sequence[int],
    objective: str,
    number: int,
    objectives: int,
) -> None:
    """Draws final accuracy with its interval at each lag, the objectives side by side."""
    shift = 0.15 * (number - (objectives - 1) / 2)
    cells = [(place, chosen(rows, objective, lag)) for place, lag in enumerate(lags)]
    cells = [(place, cell) for place, cell in cells if cell]
    found = [
        accuracy_interval([final(row) for row in cell], cell[0]["evaluations"][-1]["problems"])
        for _, cell in cells
    ]
    means = [mean for mean, _, _ in found]
    spread = [[mean - low for mean, low, _ in found], [high - mean for mean, _, high in found]]
    places = [place + shift for place, _ in cells]
    axes.errorbar(
        places,
        means,
        yerr=spread,
        marker="o",
        capsize=3,
        linewidth=1,
        color=f"C{number}",
        label=objective,
    )
