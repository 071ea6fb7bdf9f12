"""Table and plot of `benchmarks.forecast`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHOWN = {
    "wait_first_s": ("waited for the first group", "tab:red"),
    "wait_more_s": ("waited for more", "tab:orange"),
    "wait_last_s": ("waited for the last", "gold"),
    "wait_reward_s": ("waited for rewards", "tab:pink"),
    "train_s": ("forward and backward", "tab:blue"),
    "update_s": ("update", "tab:cyan"),
    "sync_s": ("sync", "tab:green"),
    "other_s": ("packing and callbacks", "tab:gray"),
}
"""Parts of a step: name and colour."""


def error(row: dict[str, Any], part: str = "seconds") -> float:
    """Returns the error of the forecast, as a share of the fact."""
    return row["forecast"][part] / row["fact"][part] - 1


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the runs as a Markdown table: medians of a step's seconds, fact / forecast."""
    lines = [
        "| run | | fact, s a step | its middle half | forecast | off by | waits: fact / forecast "
        "| training | sync |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["quarters"]
        parts = " | ".join(f"{f:.2f} / {g:.2f}" for f, g in (pair(row, names) for names in GROUPED))
        lines.append(
            f"| {row['run']} | {row['about']} | {row['fact']['seconds']:.2f} | {low:.2f} to "
            f"{high:.2f} | {row['forecast']['seconds']:.2f} | {error(row):+.0%} | {parts} |"
        )
    return "\n".join(lines)


GROUPED = (
    ("wait_first_s", "wait_more_s", "wait_last_s", "wait_reward_s"),
    ("train_s", "update_s", "other_s"),
    ("sync_s",),
)


def pair(row: dict[str, Any], parts: Sequence[str]) -> tuple[float, float]:
    """Returns fact and forecast of the sum of some parts."""
    return sum(row["fact"][part] for part in parts), sum(row["forecast"][part] for part in parts)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws two stacked bars for each run: fact, and forecast beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    ticks: list[tuple[float, str]] = []
    for place, row in enumerate(rows):
        for offset, which in ((-0.2, "fact"), (0.2, "forecast")):
            bottom = 0.0
            for part, (_, colour) in SHOWN.items():
                seconds = row[which][part]
                axes.bar(
                    place + offset,
                    seconds,
                    0.36,
                    bottom=bottom,
                    color=colour,
                    alpha=1 if which == "fact" else 0.6,
                )
                bottom += seconds
            ticks.append((place + offset, which))
        title = f"{row['run']}: {row['about']}\n{error(row):+.0%}".replace(", ", ",\n")
        axes.annotate(
            title,
            (place, max(pair(row, list(SHOWN)))),
            (0, 6),
            ha="center",
            textcoords="offset points",
        )
    axes.set_xticks([place for place, _ in ticks], [name for _, name in ticks])
    axes.set_ylabel("seconds a step, medians of its parts")
    axes.set_ylim(0, 1.25 * max(max(pair(row, list(SHOWN))) for row in rows))
    handles = [axes.bar(0, 0, color=colour) for _, colour in SHOWN.values()]
    axes.legend(
        handles, [name for name, _ in SHOWN.values()], loc="upper left", bbox_to_anchor=(1, 1)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
