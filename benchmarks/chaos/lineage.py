"""Which steps of a run that was killed survived, and whether they trained every prompt once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from benchmarks.chaos.journal import Line


def surviving(steps: Sequence[Line]) -> list[Line]:
    """The lines of the steps that the final policy is made of, in order: a step counts for the last launch to train it.

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
    """Whether every prompt of the epochs was trained exactly once in each of them.

    Args:
        lineage: See `surviving`.
        prompts_per_epoch: Rows of the data set.

    Returns:
        `prompts` trained, `missing` and `twice` among the places of the run's row, and `epochs_whole`: in each epoch
        every row of the data set was trained once.
    """
    indices = Counter(chain.from_iterable(line["indices"] for line in lineage))
    trained = indices.total()
    rows: dict[int, Counter[int]] = {}
    for line in lineage:
        for index, prompt in zip(line["indices"], line["prompts"], strict=True):
            rows.setdefault(index // prompts_per_epoch, Counter())[prompt] += 1
    return {
        "prompts": trained,
        "missing": sorted(set(range(trained)) - set(indices)),
        "twice": sorted(index for index, times in indices.items() if times > 1),
        "epochs_whole": sum(epoch == Counter(range(prompts_per_epoch)) for epoch in rows.values()),
    }


def accounted_for(lineage: Sequence[Line], end: Line) -> dict[str, Any]:
    """Whether what one unbroken launch trained is what its ledger calls trained, and nothing between is lost.

    Returns:
        `prompts` trained, `twice`, `lost` (neither trained nor open, up to the newest) and `untold` (trained, but not
        by the ledger, or the other way round), as places in the run's row; `open` counts the open ones.
    """
    indices = Counter(chain.from_iterable(line["indices"] for line in lineage))
    told = set(range(end["done_through"])) | set(end["done_ahead"])
    known = told | set(end["open"])
    return {
        "prompts": indices.total(),
        "twice": sorted(index for index, times in indices.items() if times > 1),
        "lost": sorted(set(range(max(known, default=-1) + 1)) - known),
        "untold": sorted(told ^ (set(indices) | set(end["skipped"]))),
        "open": len(end["open"]),
    }
