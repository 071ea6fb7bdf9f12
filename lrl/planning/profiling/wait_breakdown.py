"""What a step's groups say of its time: how its waits are told apart, and how long they were being written.

One reading for runs and for simulations, or forecast and fact could not be laid side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lrl.planning.profiling.timeline import GroupRecord

if TYPE_CHECKING:
    from lrl.types import Group


def by_cause(waits: Sequence[tuple[float, int]], budget: int) -> tuple[float, float, float]:
    """Seconds of waiting for the first group, for more, and for the last ones; see `StepRecord`.

    Args:
        waits: Of each group of the step in the order in which they came: seconds waited for it, and its tokens that
            are trained, prompts included.
        budget: How many of them fill a micro-batch for every rank.
    """
    first_s = more_s = last_s = 0.0
    to_come = 0
    for place, (seconds, tokens) in reversed(list(enumerate(waits))):
        to_come += tokens
        if place == 0:
            first_s = seconds
        elif place == len(waits) - 1 or to_come < budget:
            last_s += seconds
        else:
            more_s += seconds
    return first_s, more_s, last_s


def generation_s(groups: Sequence[Group]) -> float:
    """Seconds from the first of these groups being asked for to the end of the last; 0 if a checkpoint had them all."""
    asked = [group.asked_s for group in groups if group.asked_s is not None]
    written = [group.written_s for group in groups if group.written_s is not None]
    return max(written) - min(asked) if asked and written else 0.0


def group_record(group: Group) -> GroupRecord:
    """What a timeline keeps of a group."""
    lengths = [len(rollout.token_ids) for rollout in group.rollouts]
    return GroupRecord(index=group.index, prompt_tokens=len(group.prompt.token_ids), lengths=lengths)
