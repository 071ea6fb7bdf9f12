"""Open groups through a checkpoint file."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.rollouts.serialisation import load_group, save_group
from lrl.types import Group, Prompt, Rollout
from tests.checkpoints.through_files import through_a_file

PROMPT = Prompt(id=7, token_ids=[5, 6], text="?")


@st.composite
def responses(draw: st.DrawFn) -> Rollout:
    tokens = draw(st.integers(0, 20))
    reward = draw(st.none() | st.floats(-2, 2))
    return Rollout(
        token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens)),
        logprobs=draw(st.lists(st.floats(-50, 0, width=32), min_size=tokens, max_size=tokens)),
        versions=sorted(draw(st.lists(st.integers(3, 6), min_size=tokens, max_size=tokens))),
        finish_reason=draw(st.sampled_from(["", "stop", "length", "abort"])),
        text=draw(st.text(max_size=5)),
        reward=reward,
        reward_parts={} if reward is None else {"right": reward},
        reward_failure="crash: exit code 139" if reward is None else None,
        turn_weight=1.0 if reward is None else draw(st.floats(-2, 2)),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(responses(), min_size=1, max_size=4), st.booleans())
def test_a_group_comes_back_unchanged_an_unfinished_one_without_its_rewards(
    rollouts: list[Rollout], scored: bool
) -> None:
    group = Group(index=40, prompt=PROMPT, rollouts=rollouts, admitted_by=3)
    loaded = load_group(through_a_file(save_group(group, scored=scored)), PROMPT)
    if not scored:
        kept = ("token_ids", "logprobs", "versions", "finish_reason")
        group.rollouts = [
            Rollout(**{name: getattr(one, name) for name in kept}) for one in rollouts
        ]
    assert loaded == group


def test_a_token_takes_eight_bytes() -> None:
    tokens = 1000
    rollout = Rollout(
        token_ids=[70_000] * tokens, logprobs=[-1.0] * tokens, versions=[1] * 600 + [2] * 400
    )
    saved = save_group(Group(index=0, prompt=PROMPT, rollouts=[rollout] * 8), scored=False)
    tensors = [value for value in saved.values() if isinstance(value, torch.Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert size <= 8 * 8 * tokens + 8 * 2 * 12


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Prompt(id=8, token_ids=[5, 6], text="?"), "is row 8"),
        (Prompt(id=7, token_ids=[5, 7], text="?"), "has other tokens"),
        (Prompt(id=7, token_ids=[5], text="?"), "has other tokens"),
    ],
)
def test_responses_to_another_prompt_are_refused(other: Prompt, what: str) -> None:
    saved = save_group(Group(index=40, prompt=PROMPT, rollouts=[Rollout()]), scored=False)
    load_group(saved, copy.deepcopy(PROMPT))
    with pytest.raises(
        ValueError, match=rf"row 7 .* place 40 .* {what}: data\.prompts has changed"
    ):
        load_group(saved, other)
