"""The runs of `benchmarks.skewness` as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

Row = dict[str, Any]
KNOWS = {"nothing": "", "seen": ", lengths seen before", "oracle": ", oracle"}


def newest(rows: Iterable[Row]) -> list[Row]:
    """Returns the last record of each repeat of each case: a later measurement replaces an earlier
    one."""
    return list({(row["case"], row["repeat"]): row for row in rows}.values())


def cases_of(rows: Sequence[Row]) -> list[str]:
    """Returns the cases, in the order of their first run; ratios are to the first."""
    return list(dict.fromkeys(row["case"] for row in rows))


def title(case: str) -> str:
    """Returns the name of a case in the table."""
    rule, knows = case.split(":")
    return rule + KNOWS[knows]


def seconds(rows: Sequence[Row], case: str) -> dict[int, float]:
    """Returns repeat -> mean seconds of a step."""
    return {row["repeat"]: fmean(row["seconds"]) for row in rows if row["case"] == case}


def ratios(rows: Sequence[Row], case: str) -> list[float]:
    """Returns the case's seconds over those of the first case in the same repeat."""
    base, own = seconds(rows, cases_of(rows)[0]), seconds(rows, case)
    return [own[repeat] / base[repeat] for repeat in sorted(own) if repeat in base]


def floor(rows: Sequence[Row]) -> float:
    """Returns the mean seconds of a step's longest group alone, at the measured time of a token."""
    return fmean(fmean(row["longest"]) * row["alone_ms"] / 1e3 for row in rows)


def table(rows: Sequence[Row]) -> str:
    """Returns the table in Markdown: seconds of a step's generation and their ratio to the first
    case's, medians of the repeats."""
    lines = ["| rule | seconds a step | ratio |", "|---|---|---|"]
    for case in cases_of(rows):
        lines.append(
            f"| {title(case)} | {spread(list(seconds(rows, case).values()))} | "
            f"{spread(ratios(rows, case))} |"
        )
    lines.append(f"| the longest group alone | {floor(rows):.2f} | |")
    times = {(row["step_ms"], row["response_ms"]) for row in rows}
    said = ", ".join(
        f"{step:.2f} ms and {response:.3f} ms for each response" for step, response in sorted(times)
    )
    return "\n".join([*lines, "", f"decode_latency: {said}"])


def spread(values: Sequence[float]) -> str:
    """Returns median (least to most)."""
    if not values:
        return ""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws a bar for each case, a dot for each of its runs, and the floor as a line."""
    from matplotlib.figure import Figure

    cases = cases_of(rows)
    figure = Figure(figsize=(7, 0.5 * len(cases) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, case in enumerate(cases):
        values = list(seconds(rows, case).values())
        axes.barh(place, median(values), color="C0", alpha=0.5)
        axes.plot(values, [place] * len(values), "k.", markersize=4)
    axes.axvline(floor(rows), color="C3", linestyle="--", label="the longest group alone")
    axes.set_yticks(range(len(cases)), [title(case) for case in cases])
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step's generation, mean of a run")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(path, dpi=120)
