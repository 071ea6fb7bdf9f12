"""Groups of random tokens, and their micro-batches."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lrl.rollouts.packing import Packer
from lrl.types import Group, MicroBatch, Prompt, Rollout


def random_group(
    lengths: Sequence[int], prompt: Sequence[int], seed: int = 0, tokens: int = 259, index: int = 0
) -> Group:
    """Returns a group with a response of each length, without special tokens (below 3), rewarded by
    its number."""
    draw = random.Random(seed)
    rollouts = [
        Rollout(
            token_ids=[draw.randrange(3, tokens) for _ in range(length)],
            logprobs=[-5.5] * length,
            versions=[0] * length,
            finish_reason="stop",
            reward=float(number),
        )
        for number, length in enumerate(lengths)
    ]
    asked = Prompt(id=index, token_ids=list(prompt), text="")
    return Group(index=index, prompt=asked, rollouts=rollouts)


def packed(packer: Packer, groups: Sequence[Group]) -> list[MicroBatch]:
    """Returns all micro-batches of some groups."""
    rounds = [each for group in groups for each in packer.add(group)]
    return [micro for each in (*rounds, *packer.flush()) for micro in each if micro is not None]
