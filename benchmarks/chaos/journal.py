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
    """The writing end, one for each launch of a target; it makes the file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.launch = sum(line["event"] == "launch" for line in Reader(path).refresh())
        """Number of launches before this one."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, event: str, **fields: Any) -> None:
        line = {"event": event, "launch": self.launch, "time": round(time.time(), 3), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Reader:
    """The reading end; the file need not be there yet."""

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


def account(lines: Sequence[Line], prompts_per_epoch: int = 0) -> dict[str, Any]:
    """Returns what is recorded of a run that has come to its end: counts; what was trained, beside
    what the ledger calls trained; and what became of responses that were half-written at a kill."""
    lineage = surviving([line for line in lines if line["event"] == "step"])
    end = next(line for line in reversed(lines) if line["event"] == "end")
    starts = [line["resumed"] for line in lines if line["event"] == "start"]
    resumed = {name: sum(line[name] for line in starts) for name in ("responses", "tokens")}
    counts = ("continued", "rewritten", "failed")
    return {
        "launches": sum(line["event"] == "launch" for line in lines),
        "steps_done": len(lineage),
        **trained(lineage, end, prompts_per_epoch),
        "given_up": end["given_up"],
        "lag_max": max(line["lag_max"] for line in lineage),
        "resumed": resumed | {name: sum(line[name] for line in lineage) for name in counts},
    }


def trained(lineage: Sequence[Line], end: Line, prompts_per_epoch: int = 0) -> dict[str, Any]:
    """Compares the steps of `surviving` with what the ledger calls trained in the last line, `end`.

    Returns:
        `prompts`: number trained. As places in the run's order of prompts: `twice`; `lost`, neither
        trained nor open, up to the newest; `untold`, trained and not in the ledger, or the other
        way round. `open`: number of open ones. `epochs_whole`, if the rows of the data set are
        given: epochs in which each was trained once.
    """
    indices = Counter(chain.from_iterable(line["indices"] for line in lineage))
    told = set(range(end["done_through"])) | set(end["done_ahead"])
    known = told | set(end["open"])
    found = {
        "prompts": indices.total(),
        "twice": sorted(index for index, times in indices.items() if times > 1),
        "lost": sorted(set(range(max(known, default=-1) + 1)) - known),
        "untold": sorted(told ^ (set(indices) | set(end["skipped"]))),
        "open": len(end["open"]),
    }
    if prompts_per_epoch:
        epochs: dict[int, Counter[int]] = {}
        for line in lineage:
            for index, prompt in zip(line["indices"], line["prompts"], strict=True):
                epochs.setdefault(index // prompts_per_epoch, Counter())[prompt] += 1
        whole = Counter(range(prompts_per_epoch))
        found["epochs_whole"] = sum(epoch == whole for epoch in epochs.values())
    return found
