"""The journal of a target: one JSON line for each event, readable whenever the target is killed.

A line is one write of the kernel's, so it is there whole as soon as the write returns, whatever
then becomes of the process. Times are seconds since 1970, because writer and reader are two
processes.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Journal:
    """The writing end, one for each launch of a target.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.launch = sum(line["event"] == "launch" for line in Reader(path).refresh())
        """Number of launches before this one."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, event: str, **fields: Any) -> None:
        line = {"event": event, "launch": self.launch, "time": round(time.time(), 3), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Reader:
    """The reading end.

    Args:
        path: The file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        """All whole lines so far, in order."""
        self._offset = 0

    def refresh(self) -> list[Line]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines

    def of(self, event: str) -> list[Line]:
        return [line for line in self.lines if line["event"] == event]


def surviving(steps: Sequence[Line]) -> list[Line]:
    """Returns the lines of the steps that made the final policy, in order: the last launch that
    trained a step counts.

    Raises:
        ValueError: A step is missing.
    """
    last: dict[int, Line] = {}
    for line in steps:
        if line["step"] not in last or line["launch"] >= last[line["step"]]["launch"]:
            last[line["step"]] = line
    if missing := sorted(set(range(len(last))) - set(last)):
        raise ValueError(f"The journal lacks the steps {missing}.")
    return [last[step] for step in sorted(last)]


def trained_once(lineage: Sequence[Line], prompts_per_epoch: int) -> dict[str, Any]:
    """Checks that every prompt was trained exactly once in each epoch.

    Args:
        lineage: See `surviving`.
        prompts_per_epoch: Rows of the data set.

    Returns:
        `prompts`: number trained; `missing` and `twice`: indices in the run's order of prompts;
            `epochs_whole`: epochs
        in which every row of the data set was trained once.
    """
    indices, twice = _trained(lineage)
    rows: dict[int, Counter[int]] = {}
    for line in lineage:
        for index, prompt in zip(line["indices"], line["prompts"], strict=True):
            rows.setdefault(index // prompts_per_epoch, Counter())[prompt] += 1
    return {
        "prompts": indices.total(),
        "missing": sorted(set(range(indices.total())) - set(indices)),
        "twice": twice,
        "epochs_whole": sum(epoch == Counter(range(prompts_per_epoch)) for epoch in rows.values()),
    }


def accounted_for(lineage: Sequence[Line], end: Line) -> dict[str, Any]:
    """Compares what one unbroken launch trained with what its ledger calls trained.

    Returns:
        `prompts`: number trained; as indices in the run's order of prompts `twice`, `lost` (neither
            trained nor open,
        up to the newest) and `untold` (trained, but not in the ledger, or the other way round);
            `open`: number of open
        ones.
    """
    indices, twice = _trained(lineage)
    told = set(range(end["done_through"])) | set(end["done_ahead"])
    known = told | set(end["open"])
    return {
        "prompts": indices.total(),
        "twice": twice,
        "lost": sorted(set(range(max(known, default=-1) + 1)) - known),
        "untold": sorted(told ^ (set(indices) | set(end["skipped"]))),
        "open": len(end["open"]),
    }


def told(trained: dict[str, Any]) -> str:
    """Returns what `accounted_for` has found, in words."""
    wrong = ", ".join(f"{len(trained[name])} {name}" for name in ("twice", "lost", "untold"))
    return f"{trained['prompts']} prompts trained ({wrong})"


def _trained(lineage: Sequence[Line]) -> tuple[Counter[int], list[int]]:
    indices = Counter(chain.from_iterable(line["indices"] for line in lineage))
    return indices, sorted(index for index, times in indices.items() if times > 1)
