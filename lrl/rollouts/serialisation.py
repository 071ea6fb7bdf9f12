"""How an open group is kept in a checkpoint: its responses as flat tensors, and what the rewards said of them. And what
of it a resumed run reports.

The prompt is not kept, for its index finds it again; its id and a digest of its tokens show whether it is still the
same one. What the trainer adds to a group (`PolicyModule.prepare`) is left out: it is added again.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lrl.types import Group, Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a run found in its checkpoint and goes on with; its text is the line for the log."""

    step: int
    """The first step after the resume."""
    responses: int
    """Half-written responses: at least one token, and no end."""
    tokens: int
    """Tokens in them."""
    finished_groups: int

    @classmethod
    def of(cls, step: int, running: list[Group], finished_groups: int) -> Resumed:
        """Count what `running` groups have been restored with."""
        rollouts = [rollout for group in running for rollout in group.rollouts]
        lengths = [len(rollout.token_ids) for rollout in rollouts if rollout.token_ids and not rollout.finished]
        return cls(step=step, responses=len(lengths), tokens=sum(lengths), finished_groups=finished_groups)

    def __bool__(self) -> bool:
        return bool(self.responses or self.finished_groups)

    def __str__(self) -> str:
        return (
            f"Going on with {self.responses} half-written responses ({self.tokens:,} tokens) and "
            f"{self.finished_groups} finished groups of the checkpoint."
        )


def save_group(group: Group, *, judged: bool) -> dict[str, Any]:
    """A group in plain types and tensors, which `torch.load` takes with `weights_only=True`.

    Args:
        group: T tokens over all of its responses, in S runs of one version.
        judged: Whether the rewards have been asked; what they said, and the texts they saw, is kept with it.

    Returns:
        `token_ids` int32 [T], `logprobs` float32 [T], `versions` int32 [S] and `spans` int64 [S] (tokens of each run),
        and plain numbers and strings: 8 bytes a token, and its text if it is judged.
    """
    rollouts = group.rollouts
    versions = torch.tensor([version for rollout in rollouts for version in rollout.versions], dtype=torch.int32)
    versions, spans = torch.unique_consecutive(versions, return_counts=True)
    saved = {
        "index": group.index,
        "admitted_by": group.admitted_by,
        "prompt_id": group.prompt.id,
        "prompt_digest": _digest(group.prompt),
        "token_ids": torch.tensor([token for rollout in rollouts for token in rollout.token_ids], dtype=torch.int32),
        "logprobs": torch.tensor([logp for rollout in rollouts for logp in rollout.logprobs], dtype=torch.float32),
        "versions": versions,
        "spans": spans,
        "lengths": [len(rollout.token_ids) for rollout in rollouts],
        "finish_reasons": [rollout.finish_reason for rollout in rollouts],
    }
    return saved | ({"judgements": [_judgement(rollout) for rollout in rollouts]} if judged else {})


def load_group(saved: dict[str, Any], prompt: Prompt) -> Group:
    """The group that was saved.

    Args:
        saved: What `save_group` gave.
        prompt: The prompt that the run has at the group's index.

    Raises:
        ValueError: It is another prompt than the group's.
    """
    if (prompt.id, _digest(prompt)) != (saved["prompt_id"], saved["prompt_digest"]):
        what = "has other tokens" if prompt.id == saved["prompt_id"] else f"is row {prompt.id}"
        raise ValueError(
            f"The checkpoint has responses to row {saved['prompt_id']} of the data set at place {saved['index']} of "
            f"the run, and the prompt there {what}: data.prompts has changed (rows, seed, template or tokenizer). "
            "Resume with the data set it was made with."
        )
    lengths = saved["lengths"]
    token_ids, logprobs = saved["token_ids"].split(lengths), saved["logprobs"].split(lengths)
    versions = saved["versions"].repeat_interleave(saved["spans"]).split(lengths)
    judgements = saved.get("judgements", [{}] * len(lengths))
    rollouts = [
        Rollout(token_ids=ids.tolist(), logprobs=logps.tolist(), versions=by.tolist(), finish_reason=reason, **judged)
        for ids, logps, by, reason, judged in zip(
            token_ids, logprobs, versions, saved["finish_reasons"], judgements, strict=True
        )
    ]
    return Group(index=saved["index"], prompt=prompt, rollouts=rollouts, admitted_by=saved["admitted_by"])


def _judgement(rollout: Rollout) -> dict[str, Any]:
    return {
        "text": rollout.text,
        "reward": rollout.reward,
        "reward_parts": dict(rollout.reward_parts),
        "reward_failure": rollout.reward_failure,
    }


def _digest(prompt: Prompt) -> int:
    return zlib.crc32(np.asarray(prompt.token_ids, dtype="<i4").tobytes())
