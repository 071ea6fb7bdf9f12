"""The critic of turns: its values, targets and gradient, and the steps of its target.

Covers lrl/training/beside/critic.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lrl.objectives import REINFORCE
from lrl.policy import PolicyModule
from lrl.training.beside.critic import TurnCritic
from lrl.types import ENVIRONMENT, Group, Rollout
from tests.policies import (
    Steps,
    make_group,
    one_thread,  # noqa: F401
    opened,
    trainer,
)
from tests.training.beside.test_critic import (
    LiveStep,
    compare,
    gradients,
    gradients_of,
    learner,
    prepared,
)

GAMMA = 0.9


def groups() -> list[Group]:
    """Groups of several episodes and of one: of three turns with rewards, one of a single token, of
    one turn without an environment, without a token, and without a reward."""
    found = [make_group(0), make_group(1), make_group(2, responses=1)]
    longest = max(found[0].rollouts, key=lambda one: len(one.token_ids))
    for rollout in (longest, found[2].rollouts[0]):
        add_turns(rollout)
    found[1].rollouts[0] = Rollout(finish_reason="length", reward=1.0)
    found[1].rollouts[1].reward = None
    return found


def add_turns(rollout: Rollout) -> None:
    """Makes it three turns: of three tokens, one and two, and observations of two between them."""
    rollout.token_ids = [3, 7, 7, 20, 21, 9, 20, 22, 4, 1]
    rollout.logprobs = [-1.0] * 10
    rollout.versions = [0, 0, 0, *[ENVIRONMENT] * 2, 0, *[ENVIRONMENT] * 2, 0, 0]
    rollout.turn_ends = [3, 6, 10]
    rollout.turn_rewards = [0.5, -0.25, 0.0]


def with_critic(folder: str, **settings: Any) -> PolicyModule:
    """Returns a policy whose critic has heads that no gradient leaves alone, and another target."""
    critic = TurnCritic(gamma=GAMMA, **settings)
    policy = opened(folder, objective=REINFORCE(), critic=critic)
    torch.manual_seed(4)
    for head in (critic.head, critic.target_head):
        nn.init.normal_(head.weight, std=0.3)
        nn.init.normal_(head.bias, std=0.3)
    with torch.no_grad():
        for weight in () if critic.target_trunk is None else critic.target_trunk.parameters():
            weight += 0.05 * torch.randn(weight.shape)
    return policy


def written_out(folder: str, critic: TurnCritic, given: list[Group]) -> dict[str, Tensor]:
    """Returns the gradients of the sum of losses in float64, episode by episode and turn by
    turn."""
    network = AutoModelForCausalLM.from_pretrained(folder).double()
    own, slow = copy.deepcopy(critic.head).double(), copy.deepcopy(critic.target_head).double()
    trunk = None if critic.trunk is None else copy.deepcopy(critic.trunk).double()
    slow_trunk = None if trunk is None else copy.deepcopy(critic.target_trunk).double()
    total = torch.zeros((), dtype=torch.float64)
    for group in given:
        for rollout in group.rollouts:
            if rollout.reward is None or not rollout.token_ids:
                continue
            before = len(group.prompt.token_ids) - 1
            tokens = torch.tensor([group.prompt.token_ids + rollout.token_ids])
            hidden = network.model(tokens).last_hidden_state[0]
            logprobs = network.lm_head(hidden).log_softmax(-1)
            states = slow_states = hidden.detach()
            if trunk is not None:
                states = trunk(tokens).last_hidden_state[0]
                slow_states = slow_trunk(tokens).last_hidden_state[0]
            spans = (
                [(0, 3), (5, 6), (8, 10)] if rollout.turn_ends else [(0, len(rollout.token_ids))]
            )
            rewards = rollout.turn_rewards[:-1] if rollout.turn_ends else []
            rewards = [*rewards, rollout.reward - sum(rewards)]
            for turn, (start, stop) in enumerate(spans):
                v = own(states[before + start])[:2]
                q = own(states[before + stop])[2:]
                target_v = slow(slow_states[before + stop])[2:].detach()
                target_q = torch.full((2,), rewards[turn], dtype=torch.float64)
                if turn + 1 < len(spans):
                    after = slow(slow_states[before + spans[turn + 1][0]])[:2].detach()
                    target_q = target_q + GAMMA * after
                total = total + ((v - target_v) ** 2 + (q - target_q) ** 2).sum() / 2
                advantage = (q.min() - v.min()).detach()
                for place in range(start, stop):
                    logprob = logprobs[before + place, rollout.token_ids[place]]
                    total = total - advantage * logprob
    total.backward()
    return gradients_of(network, own, trunk)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("budget", "attention_tokens"), [(1, 0), (48, 10_000), (10_000, 0)])
def test_the_gradients_are_those_of_the_formulas_whatever_the_packing(
    folder: str, other_folder: str, own: bool, budget: int, attention_tokens: int
) -> None:
    policy, given = with_critic(folder, model=other_folder if own else None), groups()
    batches = prepared(policy, given, budget, attention_tokens=attention_tokens)
    compare(policy, batches, written_out(folder, policy.critic, given))


def test_a_value_whose_label_is_not_trained_learns_nothing(folder: str) -> None:
    policy, given = with_critic(folder), groups()[2]
    given.rollouts[0].versions[5:6] = [3]
    (batch,) = prepared(policy, [given], oldest_version=3)
    found = gradients(policy, [batch])
    (second,) = given.rollouts[0].turn_values[1:2]
    assert batch.num_tokens == 1
    columns, targets = batch.turn_targets[batch.mask][0, :4], torch.tensor(second.targets)
    torch.testing.assert_close(columns, targets)
    with torch.no_grad():
        now = policy(batch, "values")[batch.mask][0, :4]
    torch.testing.assert_close(found["critic.head.bias"], now - targets)


@pytest.mark.parametrize("own", [False, True])
def test_the_target_moves_by_tau_after_each_step_and_nothing_trains_it(
    folder: str, other_folder: str, own: bool
) -> None:
    policy, again = (learner(folder, other_folder if own else None, TurnCritic) for _ in range(2))
    critic = policy.critic
    (v1, v2, q1, q2), same = critic.head.weight, again.critic.head.weight
    assert not torch.equal(v1, v2) and not torch.equal(q1, q2), "twins begin apart"
    assert torch.equal(critic.head.weight, same), "and the same on every rank"
    slow = [*critic.target_head.parameters()]
    fast = [*critic.head.parameters()]
    if own:
        slow += critic.target_trunk.parameters()
        fast += critic.trunk.parameters()
    expected = [one.detach().clone() for one in fast]
    moved = []

    def check(*args: Any) -> None:
        for number, weight in enumerate(fast):
            expected[number] = expected[number] + critic.tau * (weight - expected[number])
        pairs = zip(slow, expected, strict=True)
        moved.append(all(torch.allclose(one, other, atol=1e-7) for one, other in pairs))

    policy.on_train_batch_end = check  # type: ignore[method-assign]
    trainer(max_steps=3).fit(policy, Steps([LiveStep(policy)] * 3))
    assert moved == [True] * 3
    assert not any(torch.equal(one, other) for one, other in zip(slow, fast, strict=True))
    optimized = policy.trainer.optimizers[0].param_groups
    given = {weight for group in optimized for weight in group["params"]}
    assert given >= set(fast) and not given & set(slow)


def test_a_replayed_group_gets_the_values_of_the_critic_as_it_is(folder: str) -> None:
    policy, given = with_critic(folder), groups()[2]
    policy.prepare(given, 1.0, 10_000)
    before = given.rollouts[0].turn_values
    nn.init.zeros_(policy.critic.head.weight)
    nn.init.zeros_(policy.critic.target_head.weight)
    policy.prepare(given, 1.0, 10_000)
    own, slow = policy.critic.head.bias, policy.critic.target_head.bias
    for one, old in zip(given.rollouts[0].turn_values, before, strict=True):
        assert one.to_go == old.to_go
        assert (one.state, one.action) == (own[:2].min(), own[2:].min())
        assert one.targets[:2] == tuple(slow[2:].tolist())
