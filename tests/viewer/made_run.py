"""Groups in the form in which a run writes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lrl.callbacks.rollout_file import group_lines
from lrl.rollouts.policy_text import TokenTexts
from lrl.training.prefix_tree import TrainingSample
from lrl.types import ENVIRONMENT, Fork, Rollout
from tests import made
from tests.tiny_policies import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXTS = TokenTexts(TOKENIZER)


def rollout(text: str, reward: float | None = 1.0, version: int = 0, failure: str = "") -> Rollout:
    """A response of one version, with a token a byte."""
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    return made.rollout(
        token_ids,
        reward,
        version,
        finish_reason="failed" if failure else "stop",
        text=text,
        reward_parts={} if reward is None else {"right": reward},
        reward_failure=failure or None,
    )


def episode(turn: str, observation: str, last: str) -> Rollout:
    """An episode of two turns with an observation in between."""
    first, written, second = (rollout(text) for text in (turn, observation, last))
    ends = [len(first.token_ids), sum(len(one.token_ids) for one in (first, written, second))]
    return Rollout(
        token_ids=first.token_ids + written.token_ids + second.token_ids,
        logprobs=first.logprobs + [0.0] * len(written.token_ids) + second.logprobs,
        versions=first.versions + [ENVIRONMENT] * len(written.token_ids) + second.versions,
        finish_reason="stop",
        text=turn + observation + last,
        reward=1.5,
        turn_ends=ends,
        turn_rewards=[0.5, 1.0],
    )


def branched() -> Rollout:
    """An episode whose third turn continues the first, as if there were no second."""
    found = episode("6*7", "=42", "so 42")
    again = rollout("or 41")
    found.forks = [Fork(start=len(found.token_ids), after=6)]
    found.token_ids += again.token_ids
    found.logprobs += again.logprobs
    found.versions += again.versions
    found.turn_ends.append(len(found.token_ids))
    found.turn_rewards.append(0.0)
    return found


def lines(step: int, index: int, rollouts: Sequence[Rollout], prompt: str = "1+1=") -> str:
    """The lines of a group whose responses with a reward were trained."""
    group = made.group(index, *rollouts, prompt=TOKENIZER.encode(prompt), text=prompt)
    samples = []
    for one in rollouts:
        sample = TrainingSample(
            *(index, group.prompt.token_ids),
            rollout=one,
            advantages=torch.tensor(0.5),
            trained=one.mask,
        )
        samples.append([] if one.reward is None else [sample])
    ratios = {id(one): dict.fromkeys(range(len(one.token_ids)), 0.01) for one in rollouts}
    return group_lines(group, samples, ratios, step=step, texts=TEXTS)
