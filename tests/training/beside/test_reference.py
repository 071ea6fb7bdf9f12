"""The reference policy: its log-probs, the cost of the KL, and its refresh."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lrl.objectives import REINFORCE
from lrl.policy import PolicyModule
from lrl.rollouts.learners import Replay
from lrl.training.beside.reference import Reference
from lrl.training.logprobs import label_logprobs
from lrl.types import ENVIRONMENT, Group, MicroBatch, Rollout
from tests.checkpoints.through_files import through_a_file
from tests.policies import GROUPS, FakeStep, fit, make_group, opened, pack, prepared
from tests.tiny_policies import response_logprobs


def groups() -> list[Group]:
    """With an empty response, and an observation."""
    found = [make_group(i) for i in range(3)]
    found[1].rollouts[2] = Rollout(finish_reason="stop", reward=1.0)
    max(found[2].rollouts, key=lambda one: len(one.token_ids)).versions[0] = ENVIRONMENT
    return found


def with_tokens(group: Group) -> list[Rollout]:
    return [rollout for rollout in group.rollouts if rollout.token_ids]


def test_reference_logprobs_are_the_reference_models_own(folder: str, alike_folder: str) -> None:
    policy = opened(folder, reference=Reference(model=alike_folder))
    theirs = AutoModelForCausalLM.from_pretrained(alike_folder)
    for group in prepared(policy, groups(), temperature=0.7):
        for rollout in with_tokens(group):
            with torch.no_grad():
                words = group.prompt.token_ids, rollout.token_ids, 0.7
                expected = response_logprobs(theirs, *words)
            assert rollout.reference_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_reward_is_summed_over_the_policys_tokens(
    folder: str, alike_folder: str, estimator: Any
) -> None:
    policy = opened(folder, reference=Reference(0.5, estimator, "reward", model=alike_folder))
    for group in prepared(policy, groups()):
        for rollout in with_tokens(group):
            cost = 0.0
            for mu, ref, own in zip(
                rollout.logprobs, rollout.reference_logprobs, rollout.mask, strict=True
            ):
                if not own:
                    continue
                d = min(max(ref - mu, -20.0), 20.0)
                cost += {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]
            assert rollout.kl_penalty == pytest.approx(0.5 * cost, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_loss_is_added_token_by_token(
    folder: str, alike_folder: str, estimator: Any
) -> None:
    policy = opened(
        folder, objective=REINFORCE(), reference=Reference(0.5, estimator, model=alike_folder)
    )
    plain = opened(folder, objective=REINFORCE())
    (batch,) = pack(prepared(policy, groups()), 10_000)
    logprobs, reference = plain(batch)[batch.mask], batch.reference_logprobs[batch.mask]
    d = reference - logprobs
    kl = d.square() / 2 if estimator == "k2" else d.exp() - 1 - d
    torch.testing.assert_close(
        policy.compute_loss(batch), plain.compute_loss(batch) + 0.5 * kl.sum()
    )


def test_the_reference_is_neither_trained_nor_exported(folder: str) -> None:
    policy = opened(folder, reference=Reference())
    policy.setup("fit")
    assert len(list(policy.parameters())) == len(list(opened(folder).parameters()))
    assert dict(policy.whole_weights()).keys() == dict(opened(folder).whole_weights()).keys()
    assert not any(weight.requires_grad for weight in policy.reference.network.parameters())


def run(folder: str, at: Path, steps: int, resumed: int = 0, **settings: Any) -> PolicyModule:
    """Trains up to `steps`, from a checkpoint if one of `resumed` steps is given."""
    policy = PolicyModule(folder, lr=1e-2, reference=Reference(**settings))
    before = str(at / f"step={resumed}.ckpt") if resumed else None
    fit(policy, [FakeStep(pack(GROUPS))] * steps, before, saves_in=at)
    return policy


def first(network: Any) -> torch.Tensor:
    return next(network.parameters()).detach().clone()


def test_a_refreshed_reference_follows_the_policy_and_lives_on_until_another_is_named(
    folder: str, alike_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def resumed(steps: int, **settings: Any) -> torch.Tensor:
        return first(run(folder, tmp_path, steps, steps - 1, **settings).reference.network)

    two = run(folder, tmp_path, 2, refresh_every_n_steps=2)
    refreshed = first(two.reference.network)
    assert torch.equal(refreshed, first(two.network))
    assert not torch.equal(refreshed, first(opened(folder).network))
    assert torch.equal(resumed(3, refresh_every_n_steps=2), refreshed)
    assert torch.equal(resumed(4), refreshed), "not refreshed any more"
    assert "is not restored" not in caplog.text
    named = first(opened(alike_folder).network)
    assert torch.equal(resumed(5, model=alike_folder), named), "the settings name another"
    assert f"model.reference.model was None and is {alike_folder}" in caplog.text
    assert torch.equal(resumed(6, model=alike_folder), named)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_replayed_group_gets_the_log_probs_of_the_reference_as_it_is(
    folder: str, alike_folder: str, resumed: bool
) -> None:
    before = opened(folder, reference=Reference(0.1, penalty_in="reward"))
    (group, *_) = prepared(before, groups())
    theirs = opened(folder, reference=Reference(model=alike_folder))
    (expected, *_) = prepared(theirs, groups())
    replay, loaded = Replay(1, 10), Replay(1, 10)
    replay.add(0, [copy.deepcopy(group)])
    if resumed:  # by a run with another reference, whose version is 0, too
        loaded.prompts = {group.index: group.prompt}
        loaded.load_state_dict(through_a_file(replay.state_dict()))
        (replayed,) = loaded.draw(1)
        prepared(theirs, [replayed])
    else:
        before.reference.refresh_every_n_steps = 2
        before.reference.end_step(2, opened(alike_folder).network)
        (replayed,) = replay.draw(1)
        prepared(before, [replayed])
    for one, right, old in zip(*map(with_tokens, (replayed, expected, group)), strict=True):
        assert one.reference_logprobs == pytest.approx(right.reference_logprobs, abs=1e-5)
        assert one.reference_logprobs != old.reference_logprobs
        assert one.kl_penalty != old.kl_penalty != 0.0
        assert (one.kl_penalty == 0.0) == resumed


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 40])
def test_a_references_pass_is_no_larger_than_a_micro_batch(
    folder: str, alike_folder: str, micro_batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = opened(folder, reference=Reference(model=alike_folder))
    whole = prepared(policy, groups())
    sizes: list[tuple[int, ...]] = []

    def seen(network: Any, micro: MicroBatch, chunk_tokens: int) -> torch.Tensor:
        sizes.append(tuple(micro.input_ids.shape))
        return label_logprobs(network, micro, chunk_tokens)

    monkeypatch.setattr("lrl.training.logprobs.label_logprobs", seen)
    parts = prepared(policy, groups(), micro_batch_tokens)
    assert all(rows * tokens <= micro_batch_tokens or rows == 1 for rows, tokens in sizes)
    assert len(sizes) >= 3
    for one, other in zip(whole, parts, strict=True):
        for expected, found in zip(with_tokens(one), with_tokens(other), strict=True):
            assert found.reference_logprobs == pytest.approx(expected.reference_logprobs, abs=1e-5)
