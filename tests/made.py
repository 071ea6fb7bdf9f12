"""Finished rollouts and groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lrl.types import Group, Prompt, Rollout


def rollout(
    tokens: int | Sequence[int] = 2, reward: float | None = None, version: int = 0, **more: Any
) -> Rollout:
    """A response that ended by itself, by its tokens or their number."""
    ids = [5] * tokens if isinstance(tokens, int) else list(tokens)
    usual = {"logprobs": [-1.0] * len(ids), "versions": [version] * len(ids)}
    return Rollout(token_ids=ids, reward=reward, **usual | {"finish_reason": "stop"} | more)


def group(
    index: int,
    *rollouts: Rollout,
    prompt: Sequence[int] = (1,),
    text: str = "?",
    columns: dict[str, Any] | None = None,
) -> Group:
    """The responses to the prompt of the same number."""
    asked = Prompt(id=index, token_ids=list(prompt), text=text, columns=columns or {})
    return Group(index=index, prompt=asked, rollouts=list(rollouts))
