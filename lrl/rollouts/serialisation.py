"""Serialisation of open groups in a checkpoint: responses as flat tensors, with their rewards.

The prompt is not saved, because its index finds it again; its id and a digest of its tokens show
whether it is still the same, and a fingerprint whether its other columns are, which rewards read.
(A column may hold any Python object, and a checkpoint may not.) `PolicyModule.prepare` computes its
additions again, but for a critic's values, which are those of the step that first trained a group.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lrl.checkpoints.resume import fingerprint
from lrl.types import Fork, Group, Prompt, Rollout


def save_group(group: Group, *, scored: bool) -> dict[str, Any]:
    """Returns a group in plain types and tensors, which `torch.load` accepts with
    `weights_only=True`.

    Args:
        group: T tokens over all of its responses, in S runs of one version.
        scored: Whether the group was scored; then its rewards and texts are saved, too.

    Returns:
        `token_ids` int32 [T], `logprobs` float32 [T], `versions` int32 [S] and `spans` int64 [S]
        (tokens of each run), and plain numbers and strings: 8 bytes a token, and the text if it is
        scored. An open turn is part of its episode's tokens.
    """
    rollouts = [flattened(rollout) for rollout in group.rollouts]

    def joined(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([one for each in rollouts for one in getattr(each, name)], dtype=dtype)

    versions, spans = torch.unique_consecutive(joined("versions", torch.int32), return_counts=True)
    fields = ("text", "reward", "reward_parts", "reward_failure", "values", "turn_weight")
    return {
        "index": group.index,
        "admitted_by": group.admitted_by,
        "prompt_id": group.prompt.id,
        "prompt_digest": _digest(group.prompt),
        "columns": fingerprint(group.prompt.columns),
        "token_ids": joined("token_ids", torch.int32),
        "logprobs": joined("logprobs", torch.float32),
        "versions": versions,
        "spans": spans,
        "lengths": [len(rollout.token_ids) for rollout in rollouts],
        "finish_reasons": [rollout.finish_reason for rollout in rollouts],
        "episodes": [_episode(rollout) for rollout in group.rollouts],
        "judgements": [
            {name: getattr(rollout, name) for name in fields if scored} for rollout in rollouts
        ],
    }


def has_same_columns(saved: dict[str, Any], prompt: Prompt) -> bool:
    """Whether the prompt has the columns that it had when the saved group was scored."""
    return bool(saved.get("columns") == fingerprint(prompt.columns))


def load_group(saved: dict[str, Any], prompt: Prompt, *, scored: bool = True) -> Group:
    """Returns the group of `save_group`, with its rewards only if `scored`; raises ValueError if it
    had another prompt."""
    if (prompt.id, _digest(prompt)) != (saved["prompt_id"], saved["prompt_digest"]):
        same_row = prompt.id == saved["prompt_id"]
        difference = "has other tokens" if same_row else f"is row {prompt.id}"
        raise ValueError(
            f"The checkpoint has responses to row {saved['prompt_id']} of the data set at place "
            f"{saved['index']} of the run, and the prompt there {difference}: data.prompts has "
            "changed (rows, seed, template or tokenizer). Resume with the data set it was made with."
        )
    lengths = saved["lengths"]
    tokens = zip(
        saved["token_ids"].split(lengths),
        saved["logprobs"].split(lengths),
        saved["versions"].repeat_interleave(saved["spans"]).split(lengths),
        strict=True,
    )
    rollouts = [
        Rollout(
            token_ids=token_ids.tolist(),
            logprobs=logprobs.tolist(),
            versions=versions.tolist(),
            finish_reason=saved["finish_reasons"][place],
            **(saved["judgements"][place] if scored else {}),
        )
        for place, (token_ids, logprobs, versions) in enumerate(tokens)
    ]
    for rollout, episode in zip(rollouts, saved.get("episodes", ()), strict=False):
        _restore_episode(rollout, episode)
    return Group(
        index=saved["index"], prompt=prompt, rollouts=rollouts, admitted_by=saved["admitted_by"]
    )


def flattened(rollout: Rollout) -> Rollout:
    """Returns a rollout with the tokens and the end of its open turn."""
    if (turn := rollout.open_turn) is None:
        return rollout
    return replace(
        rollout,
        token_ids=rollout.token_ids + turn.token_ids,
        logprobs=rollout.logprobs + turn.logprobs,
        versions=rollout.versions + turn.versions,
        finish_reason=turn.finish_reason,
    )


def _episode(rollout: Rollout) -> dict[str, Any]:
    """Returns the fields that only environments fill in; empty without one."""
    if not (rollout.turn_ends or rollout.open_turn is not None or rollout.failure):
        return {}
    return {
        "turn_ends": list(rollout.turn_ends),
        "turn_rewards": list(rollout.turn_rewards),
        "forks": [tuple(fork) for fork in rollout.forks],
        "recorded": None if rollout.open_turn is None else len(rollout.token_ids),
        "failure": rollout.failure,
    }


def _restore_episode(rollout: Rollout, saved: dict[str, Any]) -> None:
    """Undoes `flattened`, and fills in the rest."""
    if not saved:
        return
    rollout.turn_ends = saved["turn_ends"]
    rollout.turn_rewards = saved["turn_rewards"]
    rollout.forks = [Fork(*fork) for fork in saved.get("forks", ())]
    rollout.failure = saved["failure"]
    if (recorded := saved["recorded"]) is None:
        return
    rollout.open_turn = Rollout(finish_reason=rollout.finish_reason)
    rollout.finish_reason = ""
    for name in ("token_ids", "logprobs", "versions"):
        whole = getattr(rollout, name)
        setattr(rollout.open_turn, name, whole[recorded:])
        del whole[recorded:]


def _digest(prompt: Prompt) -> int:
    return zlib.crc32(np.asarray(prompt.token_ids, dtype="<i4").tobytes())
