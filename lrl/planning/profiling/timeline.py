"""Where a run's time went, measured or forecast: records as lines of JSON.

    {"kind": "step", "step": 3, "seconds": 8.1, ...}             one for each step
    {"kind": "micro_batch", "seconds": 0.4, "tokens": 8100, ...}  one for each micro-batch
    {"kind": "generator", "seconds": 1.0, "tokens": 640, ...}    samples of generators at work
    {"kind": "group", "index": 7, "lengths": [96, 11], ...}      one for each group that was trained

What belongs to a step comes before its record. A simulated run gives the same records as a real one, whose
`lrl.callbacks.Timeline` writes: forecast and fact are laid beside each other by them, and costs are fitted to them
(`lrl.planning.profiling.calibration`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step; its four waits, train_s, update_s, sync_s and other_s add up to its seconds."""

    step: int
    started_s: float
    """Seconds from the run's start to the end of the step before; from a crash to the resume no time passes."""
    seconds: float
    """From the end of the step before to the end of this one, which is behind its sync."""
    wait_first_s: float
    """The trainer waited, and had no group of this step yet."""
    wait_more_s: float
    """It waited, and what was still to come would fill a micro-batch."""
    wait_last_s: float
    """It waited for the last group, or for the last few that together did not fill a micro-batch."""
    train_s: float
    """Forward and backward passes."""
    update_s: float
    """The optimizer's update."""
    sync_s: float
    """The trainer prepared weights, moved them and proved them; the generators' pause is part of it."""
    pause_s: float
    """The longest that a generator stood still in the sync."""
    generation_s: float
    """From the admission of the step's first group to the last token of its last; a resume is an admission."""
    tokens: int
    """Answer tokens that were trained."""
    lags: dict[int, int] = field(default_factory=dict)
    """lag -> answer tokens of that lag, masked ones included"""
    wait_reward_s: float = 0.0
    """It waited for a group whose responses were written, until it was scored; in no other wait. None in a
    simulation."""
    other_s: float = 0.0
    """The rest: packing, a reference's log-probs, clipping, loggers and other callbacks. None in a simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRecord:
    """One forward and backward pass."""

    seconds: float
    tokens: int
    """Sum of the sequences' lengths, prompts included, padding not."""
    tokens_squared: int
    """Sum of the squares of these lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorRecord:
    """A stretch of time in which one generator was at work throughout: neither idle nor paused."""

    seconds: float
    tokens: int = 0
    """Tokens written in it, over all responses."""
    responses: float = 0.0
    """Responses being written, on average over the stretch; tokens / responses is the number of decode steps."""
    context_tokens: float = 0.0
    """Sum of their contexts (prompt and answer so far), on average over the stretch."""
    prefill_tokens: int = 0
    """Tokens read in it: prompts of responses whose first token it wrote, or contexts of such as were read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The responses to one prompt."""

    index: int
    """`Group.index`."""
    prompt_tokens: int
    lengths: list[int]
    """Tokens of each response."""


Record = StepRecord | MicroBatchRecord | GeneratorRecord | GroupRecord
KINDS: dict[str, type[Record]] = {
    "step": StepRecord,
    "micro_batch": MicroBatchRecord,
    "generator": GeneratorRecord,
    "group": GroupRecord,
}
NAMES = {kind: name for name, kind in KINDS.items()}


def line(record: Record) -> str:
    """A record as a line of JSON."""
    return json.dumps({"kind": NAMES[type(record)]} | asdict(record)) + "\n"


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a timeline; whatever was in the file is gone."""
    with path.open("w") as file:
        file.writelines(map(line, records))


def append(path: Path, records: Iterable[Record]) -> None:
    """Write behind what is in the file."""
    with path.open("a") as file:
        file.write("".join(map(line, records)))


def keep(path: Path, steps: int) -> list[StepRecord]:
    """Take from a timeline what lies behind its steps before step `steps`: they are trained again.

    A last line that a crash cut short goes too. Nothing is done if there is no file.

    Returns:
        The steps that are kept.
    """
    if not path.exists():
        return []
    kept, found, end = list[StepRecord](), list[str](), 0
    for number, text in enumerate(path.read_text().splitlines(keepends=True), 1):
        try:
            record = _record(text, f"{path}, line {number}")
        except ValueError:
            break
        found.append(text)
        if isinstance(record, StepRecord):
            if record.step >= steps:
                break
            kept, end = [*kept, record], number
    path.write_text("".join(found[:end]))
    return kept


def read(path: Path) -> list[Record]:
    """The records of a timeline.

    Raises:
        ValueError: A line is not a record; the message has its number.
    """
    with path.open() as file:
        return [_record(text, f"{path}, line {number}") for number, text in enumerate(file, 1)]


def _record(text: str, where: str) -> Record:
    try:
        found = json.loads(text)
        kind = KINDS[found.pop("kind")]
        if "lags" in found:
            found["lags"] = {int(lag): tokens for lag, tokens in found["lags"].items()}
        return kind(**found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        known = "; ".join(f"{name}: {', '.join(f.name for f in fields(kind))}" for name, kind in KINDS.items())
        raise ValueError(f"{where}: not a record of a timeline ({error!r}). There may be {known}.") from error
