"""The critic: its values, its gradient and the policy's under it, and the steps of both.

Covers lrl/training/beside/turn_critic.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from transformers import AutoModelForCausalLM

from lrl.advantages import GAE, Advantages, ArCHer
from lrl.errors import ConfigError
from lrl.objectives import REINFORCE
from lrl.policy import PolicyModule
from lrl.rollouts.ledger import load_group, save_group
from lrl.training.beside.critic import Critic
from lrl.training.beside.reference import Reference
from lrl.training.beside.turn_critic import TurnCritic
from lrl.training.lora import LoRA
from lrl.types import ENVIRONMENT, Group, MicroBatch, Rollout
from tests.checkpoints.through_files import through_a_file
from tests.policies import FakeStep, fit, flat, flat_gradient, make_group, opened, pack, prepared

LAM, VALUE_LAM, GAMMA = 0.9, 0.7, 0.9


@torch.no_grad()
def with_critic(folder: str, kind: type[Critic] = Critic, model: str | None = None) -> PolicyModule:
    """Returns a policy whose critic has heads that no gradient leaves alone, and another target."""
    own = {"gamma": GAMMA} if kind is TurnCritic else {"lam": VALUE_LAM}
    policy = opened(folder, objective=REINFORCE(), critic=kind(model, **own))
    torch.manual_seed(4)
    for name, weight in policy.critic.named_parameters():
        if "head." in name:
            torch.nn.init.normal_(weight, std=0.3)
        elif name.startswith("target_"):
            weight += 0.05 * torch.randn(weight.shape)
    return policy


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


def packed(
    policy: PolicyModule, given: list[Group], budget: int = 10_000, **settings: Any
) -> list[MicroBatch]:
    advantages: Advantages = ArCHer() if policy.critic.of_turns else GAE(LAM)
    return pack(prepared(policy, given, budget), budget, advantages=advantages, **settings)


def gradients(policy: PolicyModule, batches: list[MicroBatch]) -> dict[str, Tensor]:
    policy.zero_grad()
    for batch in batches:
        policy.compute_loss(batch).backward()
    return {
        name: weight.grad.clone()
        for name, weight in policy.named_parameters()
        if weight.requires_grad
    }


def written_out(folder: str, critic: Critic, given: list[Group]) -> dict[str, Tensor]:
    """Returns the gradients of the sum of losses in float64, episode by episode."""
    network = AutoModelForCausalLM.from_pretrained(folder).double()
    own, trunk = (copy.deepcopy(one) for one in (critic.head, critic.trunk))
    own, trunk = own.double(), None if trunk is None else trunk.double()
    total = torch.zeros((), dtype=torch.float64)
    for group in given:
        first = len(group.prompt.token_ids) - 1
        for rollout in group.rollouts:
            if rollout.reward is None or not rollout.token_ids:
                continue
            tokens = torch.tensor([group.prompt.token_ids + rollout.token_ids])
            hidden = network.model(tokens).last_hidden_state[0]
            logprobs = network.lm_head(hidden).log_softmax(-1)[range(first, len(hidden) - 1)]
            logprobs = logprobs[range(len(logprobs)), rollout.token_ids]
            states = [hidden.detach()]
            if trunk is not None:
                states = [trunk(tokens).last_hidden_state[0]]
            if not isinstance(critic, TurnCritic):
                total = total + loss_of_tokens(rollout, logprobs, own(states[0][first:])[:, 0])
                continue
            if critic.target_trunk is not None:
                slow_trunk = copy.deepcopy(critic.target_trunk).double()
                states.append(slow_trunk(tokens).last_hidden_state[0])
            slow = copy.deepcopy(critic.target_head).double()(states[-1][first:]).detach()
            total = total + loss_of_turns(rollout, logprobs, own(states[0][first:]), slow)
    total.backward()
    return gradients_of(network, own, trunk)


def loss_of_tokens(rollout: Rollout, logprobs: Tensor, values: Tensor) -> Tensor:
    """Policy's and critic's loss, token by token."""
    loss = torch.zeros((), dtype=torch.float64)
    gains = dict.fromkeys([end - 1 for end in rollout.turn_ends], 0.0)
    gains |= zip(gains, rollout.turn_rewards, strict=True)
    gains[len(rollout.token_ids) - 1] = rollout.reward - sum(rollout.turn_rewards[:-1])
    places = [i for i, own in enumerate(rollout.mask) if own]
    fixed = values.detach()[places]
    for i, place in enumerate(places):
        advantage, target = 0.0, fixed[i].item()
        for k in range(i, len(places)):
            last = k + 1 == len(places)
            error = gains.get(places[k], 0.0) + (0.0 if last else fixed[k + 1]) - fixed[k]
            advantage = advantage + LAM ** (k - i) * error
            target = target + VALUE_LAM ** (k - i) * error
        loss = loss - advantage * logprobs[place] + (values[place] - target) ** 2 / 2
    return loss


def loss_of_turns(rollout: Rollout, logprobs: Tensor, values: Tensor, slow: Tensor) -> Tensor:
    """The same turn by turn; `slow` are the target's values."""
    loss = torch.zeros((), dtype=torch.float64)
    spans = [(0, 3), (5, 6), (8, 10)] if rollout.turn_ends else [(0, len(rollout.token_ids))]
    rewards = rollout.turn_rewards[:-1] if rollout.turn_ends else []
    rewards = [*rewards, rollout.reward - sum(rewards)]
    for turn, (start, stop) in enumerate(spans):
        v, q, target_v = values[start, :2], values[stop, 2:], slow[stop, 2:]
        target_q = torch.full((2,), rewards[turn], dtype=torch.float64)
        if turn + 1 < len(spans):
            target_q = target_q + GAMMA * slow[spans[turn + 1][0], :2]
        loss = loss + ((v - target_v) ** 2 + (q - target_q) ** 2).sum() / 2
        loss = loss - (q.min() - v.min()).detach() * logprobs[start:stop].sum()
    return loss


def gradients_of(network: Any, head: Any, trunk: Any) -> dict[str, Tensor]:
    """Returns the gradients by the names of a policy's weights."""
    modules = {"network": network, "critic.head": head, "critic.trunk": trunk}
    return {
        f"{prefix}.{name}": weight.grad
        for prefix, module in modules.items()
        if module is not None
        for name, weight in module.named_parameters()
    }


@pytest.mark.parametrize("kind", [Critic, TurnCritic])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("budget", "attention_tokens"), [(1, 0), (48, 10_000), (10_000, 0)])
def test_the_gradients_are_those_of_the_formulas_whatever_the_packing(
    folder: str,
    other_folder: str,
    kind: type[Critic],
    own: bool,
    budget: int,
    attention_tokens: int,
) -> None:
    policy, given = with_critic(folder, kind, other_folder if own else None), groups()
    batches = packed(policy, given, budget, attention_tokens=attention_tokens)
    found, expected = gradients(policy, batches), written_out(folder, policy.critic, given)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-3, name
        torch.testing.assert_close(found[name].double(), gradient, atol=2e-4, rtol=2e-4, msg=name)


class LiveStep(FakeStep):
    """A step that prepares and packs its groups when it is trained, as the step stream does."""

    def __init__(self, policy: PolicyModule) -> None:
        super().__init__([])
        self.policy = policy

    def __iter__(self) -> Iterator[MicroBatch]:
        self.batches = packed(self.policy, groups(), 48)
        yield from self.batches


def run(policy: PolicyModule, steps: int, *how: Any, **settings: Any) -> list[dict[str, float]]:
    return fit(policy, [LiveStep(policy)] * steps, *how, **settings)


def learner(
    folder: str, own: str | None = None, kind: type[Critic] = Critic, **settings: Any
) -> PolicyModule:
    critic = kind(own, lr=1e-2, value_only_steps=2, max_grad_norm=0.5)
    policy = PolicyModule(folder, objective=REINFORCE(), critic=critic, lr=1e-3, **settings)
    policy.configure_model()
    return policy


def test_the_policy_stays_as_it_is_while_the_value_learns_alone(folder: str) -> None:
    policy = learner(folder, warmup_steps=2)
    found = [(flat(policy.network.parameters()), flat(policy.critic.parameters()))]

    def seen(*_: Any) -> None:
        found.append((flat(policy.network.parameters()), flat(policy.critic.parameters())))

    run(policy, 4, callbacks=[LambdaCallback(on_train_batch_end=seen)])
    changes = [
        tuple(not torch.equal(*both) for both in zip(before, after, strict=True))
        for before, after in pairwise(found)
    ]
    assert changes == [(False, True), (False, True), (True, True), (True, True)]


def test_the_value_learns_the_returns_and_its_metrics_say_so(folder: str) -> None:
    policy = PolicyModule(folder, critic=Critic(lr=8e-2, value_only_steps=20), lr=1e-3)
    found = run(policy, 20)
    assert [one["policy/lr"] for one in found] == [0.0] * 20
    assert found[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found[-1]["critic/explained_variance"] > 0.5
    assert found[-1]["critic/loss"] < 0.5 * found[0]["critic/loss"]
    given = [one for group in groups() for one in group.rollouts if one.reward is not None]
    returns = torch.tensor([gain for one in given for gain in returns_of(one)])
    assert found[0]["critic/return_mean"] == pytest.approx(returns.mean().item())
    assert found[0]["critic/loss"] == pytest.approx(returns.square().mean().item() / 2)


def returns_of(rollout: Rollout) -> list[float]:
    """Returns what is still to come at each token of the policy."""
    turns = list(zip(rollout.turn_ends, rollout.turn_rewards, strict=True))
    places = [place for place, own in enumerate(rollout.mask) if own]
    return [rollout.reward - sum(paid for end, paid in turns if end <= at) for at in places]


def test_policy_and_critic_are_clipped_apart(folder: str) -> None:
    policy = learner(folder, max_grad_norm=0.25)
    clipped: list[float] = []

    def before_the_step(*_: Any) -> None:
        for module in (policy.network, policy.critic):
            clipped.append(flat_gradient(module).norm().item())

    (found,) = run(policy, 1, callbacks=[LambdaCallback(on_before_optimizer_step=before_the_step)])
    assert found["policy/grad_norm"] > 0.25 and found["critic/grad_norm"] > 0.5
    assert clipped == pytest.approx([0.25, 0.5], rel=1e-3)


@pytest.mark.parametrize("kind", [Critic, TurnCritic])
@pytest.mark.parametrize("own", [False, True])
def test_a_resumed_run_has_the_values_and_moments_of_an_unbroken_one(
    folder: str, other_folder: str, tmp_path: Path, own: bool, kind: type[Critic]
) -> None:
    model = other_folder if own else None
    unbroken, resumed = learner(folder, model, kind), learner(folder, model, kind)
    expected = run(unbroken, 5, saves_in=tmp_path)
    found = run(resumed, 5, str(tmp_path / "step=3.ckpt"))
    for row, whole in zip(found, expected[3:], strict=True):
        assert row.items() <= whole.items()  # which still has those of earlier lags
        assert {"critic/explained_variance", "policy/loss", "policy/grad_norm"} <= row.keys()
    assert torch.equal(flat(resumed.parameters()), flat(unbroken.parameters()))


def test_a_checkpoint_is_resumed_with_the_critic_it_was_made_with(
    folder: str, tmp_path: Path
) -> None:
    run(learner(folder), 1, saves_in=tmp_path)
    for policy, said in (
        (PolicyModule(folder), "made with model.critic a head on the policy.* None"),
        (
            learner(folder, None, TurnCritic),
            "a head on the policy, .* a head on the policy, of turns",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            run(policy, 2, str(tmp_path / "step=1.ckpt"))


def test_a_replayed_group_keeps_its_values_also_through_a_checkpoint(folder: str) -> None:
    policy, given = with_critic(folder), groups()[2]
    prepared(policy, [given])
    before = [rollout.values for rollout in given.rollouts]
    torch.nn.init.zeros_(policy.critic.head.weight)
    again = load_group(through_a_file(save_group(given, scored=True)), given.prompt)
    for group in prepared(policy, [given, again]):
        assert [rollout.values for rollout in group.rollouts] == before
    assert [one.returns for one in again.rollouts] == [one.returns for one in given.rollouts]


@pytest.mark.parametrize("own", [False, True])
def test_values_and_log_probs_are_the_same_where_the_prompt_is_read_once(
    folder: str, own: bool
) -> None:
    policy = with_critic(folder, model=folder if own else None)
    policy.reference = Reference(0.1)
    assert policy.responses_share.prefixes
    whole, shared = prepared(policy, groups()), prepared(policy, groups(), attention_tokens=10_000)
    for copies, once in zip(whole, shared, strict=True):
        for one, other in zip(copies.rollouts, once.rollouts, strict=True):
            for name in ("values", "returns", "reference_logprobs"):
                torch.testing.assert_close(
                    *(torch.tensor(getattr(each, name) or []) for each in (one, other))
                )


def test_the_critic_lives_beside_adapters_and_in_their_checkpoint(folder: str) -> None:
    policy = learner(folder, lora=LoRA(rank=2))
    before = flat(policy.critic.parameters())
    run(policy, 1)
    assert not torch.equal(flat(policy.critic.parameters()), before)
    assert not any("critic" in name for name, _ in policy.whole_weights())
    saved = policy.state_dict().keys()
    assert {"critic.head.weight", "critic.head.bias"} < saved
    assert all("lora_" in name for name in saved if not name.startswith("critic."))


def test_a_loss_of_ones_own_without_the_critics_is_refused(folder: str) -> None:
    class Own(PolicyModule):
        def compute_loss(self, micro: MicroBatch) -> Tensor:
            return -self(micro)[micro.mask].sum()

    policy = Own(folder, critic=Critic(value_only_steps=0))
    policy.configure_model()
    with pytest.raises(ConfigError, match="Own.compute_loss leaves out the loss of model.critic"):
        run(policy, 1)


# ---- of turns


def test_a_value_whose_label_is_not_trained_learns_nothing(folder: str) -> None:
    policy, given = with_critic(folder, TurnCritic), groups()[2]
    given.rollouts[0].versions[5:6] = [3]
    (batch,) = packed(policy, [given], oldest_version=3)
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

    def check(*_: Any) -> None:
        for number, weight in enumerate(fast):
            expected[number] = expected[number] + critic.tau * (weight - expected[number])
        pairs = zip(slow, expected, strict=True)
        moved.append(all(torch.allclose(one, other, atol=1e-7) for one, other in pairs))

    run(policy, 3, callbacks=[LambdaCallback(on_train_batch_end=check)])
    assert moved == [True] * 3
    assert not any(torch.equal(one, other) for one, other in zip(slow, fast, strict=True))
    optimized = policy.trainer.optimizers[0].param_groups
    given = {weight for group in optimized for weight in group["params"]}
    assert given >= set(fast) and not given & set(slow)


def test_a_replayed_group_of_episodes_gets_the_values_of_the_critic_as_it_is(folder: str) -> None:
    policy = with_critic(folder, TurnCritic)
    (given,) = prepared(policy, groups()[2:])
    before = given.rollouts[0].turn_values
    torch.nn.init.zeros_(policy.critic.head.weight)
    torch.nn.init.zeros_(policy.critic.target_head.weight)
    prepared(policy, [given])
    own, slow = policy.critic.head.bias, policy.critic.target_head.bias
    for one, old in zip(given.rollouts[0].turn_values, before, strict=True):
        assert one.to_go == old.to_go
        assert (one.state, one.action) == (own[:2].min(), own[2:].min())
        assert one.targets[:2] == tuple(slow[2:].tolist())
