"""Episodes whose observations follow other turns than the last: one response, a tree of tokens.

Covers lrl/types.py, lrl/rollouts/episodes/episode.py, lrl/training/collate.py.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrl.advantages import GroupMean
from lrl.environments import Environment, Policy
from lrl.environments.base import BEGINNING
from lrl.objectives.base import Tokens, token_weights
from lrl.rollouts.ledger import load_group, save_group
from lrl.rollouts.packing import Packer
from lrl.training.collate import each_rollout
from lrl.types import Group, MicroBatch, Rollout
from tests.environments.here import Here
from tests.generators.model_fleet import Asked, ModelClient
from tests.policies import packed
from tests.rollouts.episodes.test_episode import PROMPT, play

LETTERS = 3
"""Different tokens; so few that observations and turns often begin alike."""
Plan = list[tuple[float, list[int]]]
"""For each turn where its observation follows (a share of what is written), and its tokens."""
plans = st.lists(
    st.tuples(st.floats(0, 1), st.lists(st.integers(0, LETTERS - 1), max_size=4)),
    min_size=1,
    max_size=7,
)


class Wanders(Environment):
    def __init__(self, plan: Plan, branches: bool = True) -> None:
        self.plan = plan
        self.branches = branches

    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        for number, (share, observation) in enumerate(self.plan):
            after = round(share * number) - 1
            await policy.turn(observation, after=None if after == number - 1 else after)
        return 1.0


class Sampler(ModelClient):
    """Writes random turns of some letters, ends of a turn included; each token has a log-prob of its
    own."""

    def __init__(self, letters: int = LETTERS, seed: int = 7) -> None:
        super().__init__()
        self.letters = letters
        self.draw = random.Random(seed)
        self.read: dict[float, list[int]] = {}
        """Log-prob of a token -> what the policy read before it, and the token."""

    async def fill(self, asked: Asked) -> None:
        stops = asked.sampling.stop_tokens
        for rollout in asked.rollouts:
            await asyncio.sleep(0.001)
            for _ in range(asked.sampling.max_tokens):
                ends = self.draw.random() < 0.2
                token = stops[0] if ends else self.draw.randrange(self.letters)
                logprob = -float(1 + len(self.read))
                asked.add(rollout, token, logprob)
                self.read[logprob] = asked.prompt_ids + rollout.token_ids
                if token in stops:
                    break
            asked.end(rollout)


def played(plan: Plan, max_tokens: int = 1000, count: int = 1) -> tuple[Group, Sampler]:
    sampler = Sampler()
    group = Group(index=3, prompt=PROMPT, rollouts=[Rollout() for _ in range(count)])
    play(Here(Wanders(plan)), sampler.generate, group.rollouts, max_tokens)
    for number, rollout in enumerate(group.rollouts):
        rollout.reward = float(number)
        rollout.reward_parts = {"environment": rollout.reward}
    return group, sampler


def trained_tokens(batches: Sequence[MicroBatch]) -> list[tuple[float, list[int]]]:
    """Log-prob of each trained token, with all that stands before it in its row, and itself."""
    found = []
    for batch in batches:
        for number in range(batch.num_sequences):
            row, columns = (batch.sequence_ids == number).nonzero(as_tuple=True)
            ids = batch.input_ids[row, columns].tolist()
            for place in range(len(ids)):
                at = row[place], columns[place]
                if batch.mask[at]:
                    label = int(batch.labels[at])
                    found.append((batch.behaviour_logprobs[at].item(), [*ids[: place + 1], label]))
    return found


@given(plans, st.sampled_from([20, 1000]), st.sampled_from([1, 64]))
def test_every_token_is_trained_once_and_reads_what_the_policy_read(
    plan: Plan, max_tokens: int, budget: int
) -> None:
    group, sampler = played(plan, max_tokens, count=2)
    packer = Packer(budget, GroupMean(), 1.0)
    batches = packed(packer, [group])
    found = trained_tokens(batches)
    assert Counter(logprob for logprob, _ in found) == dict.fromkeys(sampler.read, 1)
    for logprob, read in found:
        assert read == sampler.read[logprob]
    assert packer.tokens == len(sampler.read) and packer.masked_tokens == 0
    assert packer.sequences == 2, "an episode is one response"
    for rollout in group.rollouts:
        assert len(rollout.token_ids) <= max_tokens
    assert load_group(save_group(group, scored=True), group.prompt).rollouts == group.rollouts


@given(plans)
def test_an_observation_follows_the_turn_that_is_named(plan: Plan) -> None:
    _, sampler = played(plan)
    for number, (share, observation) in enumerate(plan):
        after = round(share * number) - 1
        before = [*PROMPT.token_ids]
        if after != BEGINNING:
            before = sampler.asked[after].prompt_ids + sampler.asked[after].rollouts[0].token_ids
        assert sampler.asked[number].prompt_ids == before + observation


@given(plans, st.sampled_from([1, 64]), st.sampled_from([0, 2]))
def test_each_episode_keeps_its_weight_whatever_its_branches(
    plan: Plan, budget: int, oldest: int
) -> None:
    group, _ = played(plan, count=3)
    cut = group.rollouts[0]
    cut.versions = [min(version, 1 + number % 2) for number, version in enumerate(cut.versions)]
    batches = packed(Packer(budget, GroupMean(), 1.0, oldest_version=oldest), [group])
    weights: Counter[float] = Counter()
    for batch in batches:
        tokens = Tokens.select(torch.zeros(batch.mask.shape), batch, 5)
        found = token_weights("sequence", batch)
        for advantage, weight in zip(tokens.advantages.tolist(), found.tolist(), strict=True):
            weights[advantage] += weight
    assert all(abs(weight - 1) < 1e-5 for weight in weights.values())
    assert len(weights) >= 2


def test_a_token_that_several_branches_read_has_one_number_of_the_reference() -> None:
    group, _ = played([(0.0, [1, 2]), (0.0, [1, 2, 0]), (0.5, [0]), (0.0, [2])])
    (rollout,) = group.rollouts
    assert len(rollout.branches) >= 3

    def places(micros: Sequence[MicroBatch]) -> list[torch.Tensor]:
        return [micro.position_ids + micro.labels / 10 for micro in micros]

    ((_, found),) = each_rollout(group, 1.0, 64, places)
    for branch in rollout.branches:
        for position, place in enumerate(branch.places, start=len(PROMPT.token_ids) - 1):
            expected = position + rollout.token_ids[place] / 10
            assert found[place].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("plan", "branches", "why"),
    [
        ([(0.0, []), (0.0, [])], False, "`branches` is not true"),
        ([(0.0, []), (2.0, [])], True, "`after` is 1, and the policy has written 1 turns"),
    ],
)
def test_a_branch_that_cannot_be_is_an_error_of_the_environment(
    plan: Plan, branches: bool, why: str
) -> None:
    rollout = Rollout()
    play(Here(Wanders(plan, branches)), Sampler().generate, [rollout])
    assert why in rollout.failure
