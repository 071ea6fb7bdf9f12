"""A run's timeline, measured or forecast: records as lines of JSON.

    {"kind": "step", "step": 3, "seconds": 8.1, ...}             one for each step
    {"kind": "micro_batch", "seconds": 0.4, "tokens": 8100, ...}  one for each micro-batch
    {"kind": "generator", "seconds": 1.0, "tokens": 640, ...}    intervals of generators at work
    {"kind": "group", "index": 7, "lengths": [96, 11], ...}      one for each trained group

A step's other records come before its own. Real runs (`lrl.callbacks.Timeline`) and simulated ones
make the same records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lrl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step; its four waits, train_s, update_s and sync_s add up to its seconds."""

    step: int
    started_s: float
    """Seconds from the run's start to the end of the step before; from a crash to the resume no
    time passes."""
    seconds: float
    """From the end of the step before to the end of this one, its sync included."""
    wait_first_s: float
    """Wait of the trainer for the step's first group."""
    wait_more_s: float
    """Wait for the groups between its first and its last."""
    wait_last_s: float
    """Wait for its last group."""
    train_s: float
    """Forward and backward passes."""
    update_s: float
    """The optimizer's update and, in a real run, the rest: packing, a reference's log-probs,
    clipping, loggers and other callbacks."""
    sync_s: float
    """The trainer prepared weights and moved them; the generators' pause is part of it."""
    pause_s: float
    """Longest pause of a generator in the sync."""
    generation_s: float
    """From the admission of the step's first group to the last token of its last; a resume is an
    admission."""
    tokens: int
    """Trained response tokens."""
    lags: dict[int, int] = field(default_factory=dict)
    """lag -> response tokens of that lag, masked ones included"""
    wait_reward_s: float = 0.0
    """Wait for the rewards of a written group; in no other wait. 0 in a simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRecord:
    """One forward and backward pass."""

    seconds: float
    tokens: int
    """Sum of the lengths of sequences, or of trees of them; prompts included, padding not."""
    tokens_squared: int
    """Sum of the squares of these lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorRecord:
    """An interval in which one generator worked without a break: neither idle nor paused."""

    seconds: float
    tokens: int = 0
    """Tokens written in it, over all responses."""
    responses: float = 0.0
    """Responses being written, mean over the interval; tokens / responses is the number of decode
    steps."""
    context_tokens: float = 0.0
    """Sum of their contexts (prompt and response so far), mean over the interval."""
    prefill_tokens: int = 0
    """Tokens prefilled in it: prompts of responses that began, contexts of responses that were
    prefilled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The responses to one prompt."""

    index: int
    """`Group.index`."""
    prompt_tokens: int
    lengths: list[int]
    """Tokens of each response, what an environment wrote included."""


Record = StepRecord | MicroBatchRecord | GeneratorRecord | GroupRecord
KINDS: dict[str, type[Record]] = {
    "step": StepRecord,
    "micro_batch": MicroBatchRecord,
    "generator": GeneratorRecord,
    "group": GroupRecord,
}


def write(path: Path, records: Iterable[Record], mode: str = "w") -> None:
    names = {kind: name for name, kind in KINDS.items()}
    with path.open(mode) as file:
        for record in records:
            file.write(json.dumps({"kind": names[type(record)]} | asdict(record)) + "\n")


def truncate(path: Path, steps: int) -> list[StepRecord]:
    """Removes the records of step `steps` and later ones, and a last line that a crash cut short;
    returns the steps that stay."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    kept: list[StepRecord] = []
    end = 0
    with suppress(ValueError, KeyError, TypeError):
        for number, text in enumerate(lines, 1):
            record = _record(text)
            if isinstance(record, StepRecord) and record.step < steps:
                kept.append(record)
                end = number
    path.write_text("".join(lines[:end]))
    return kept


def read(path: Path) -> list[Record]:
    """Reads a timeline; raises ValueError, with its number, for a line that is not a record."""
    records = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            records.append(_record(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not a record of a timeline.") from error
    return records


def _record(text: str) -> Record:
    found = json.loads(text)
    kind = KINDS[found.pop("kind")]
    # Older files have the turns of groups, and the update and the rest of a step apart.
    for gone in ("turns", "attention_tokens"):
        found.pop(gone, None)
    if "other_s" in found:
        found["update_s"] += found.pop("other_s")
    if "lags" in found:
        found["lags"] = {int(lag): tokens for lag, tokens in found["lags"].items()}
    return kind(**found)


def generation_s(groups: Sequence[Group]) -> float:
    """Returns the seconds from the first request for these groups to the last token; 0 if a
    checkpoint had them all."""
    requested = [group.asked_s for group in groups if group.asked_s is not None]
    written = [group.written_s for group in groups if group.written_s is not None]
    return max(written) - min(requested) if requested and written else 0.0


def group_record(group: Group) -> GroupRecord:
    return GroupRecord(
        index=group.index,
        prompt_tokens=len(group.prompt.token_ids),
        lengths=[len(rollout.token_ids) for rollout in group.rollouts],
    )
