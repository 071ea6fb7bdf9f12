"""The check of every trained token after a broken sync, and its verdict."""

from __future__ import annotations

import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.chaos import sync
from benchmarks.chaos.token_proof import TokenRecorder
from lrl.types import Group, Prompt, Rollout


class Fixed(torch.nn.Module):
    """Gives every token the same distribution; one parameter decides which."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([first, 0.0]))

    def forward(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.logits.expand(*ids.shape, 2))


def logprob(first: float, temperature: float = 1.0) -> float:
    return first / temperature - math.log(math.exp(first / temperature) + 1.0)


def recorded_tokens(*rollouts: Rollout, step: int = 2) -> TokenRecorder:
    """Versions 0, 1, 2 give token 0 the logit 0, 1, 2."""
    tokens = TokenRecorder()
    tokens.weights = {version: Fixed(float(version)).state_dict() for version in range(3)}
    prompt = Prompt(id=4, token_ids=[1, 1], text="")
    tokens.groups = [(step, Group(index=0, prompt=prompt, rollouts=list(rollouts)))]
    return tokens


def rollout(logprobs: list[float], versions: list[int]) -> Rollout:
    return Rollout(
        token_ids=[0] * len(logprobs), logprobs=logprobs, versions=versions, finish_reason="stop"
    )


def test_tokens_agree_with_the_version_they_name_and_not_with_the_one_before() -> None:
    responses = rollout([logprob(0.0), logprob(1.0)], [0, 1]), rollout([logprob(2.0)], [2])
    proof = recorded_tokens(*responses).verify(Fixed(0.0), 1.0)
    assert (proof.tokens, proof.largest_lag, proof.missing) == (3, 2, 0)
    assert proof.difference < 1e-5
    assert proof.under_the_version_before == pytest.approx(logprob(1.0) - logprob(0.0), abs=1e-5)


def test_a_token_by_half_updated_weights_is_found_with_its_version() -> None:
    proof = recorded_tokens(rollout([logprob(0.0), logprob(0.5)], [0, 1])).verify(Fixed(0.0), 1.0)
    assert proof.difference == pytest.approx(logprob(1.0) - logprob(0.5), abs=1e-5)
    assert proof.worst_version == 1


def test_only_a_carried_response_may_be_by_a_newer_version_than_it_names() -> None:
    proof = recorded_tokens(rollout([logprob(2.0)], [1])).verify(Fixed(0.0), 1.0)
    assert proof.difference == pytest.approx(logprob(2.0) - logprob(1.0), abs=1e-5)


def test_a_carried_response_may_be_by_a_newer_version_and_by_no_older_one() -> None:
    for written_by, within in ((2.0, True), (0.0, False)):
        carried = rollout([logprob(written_by)], [1])
        tokens = recorded_tokens(carried)
        tokens._carried.append(carried)
        proof = tokens.verify(Fixed(0.0), 1.0)
        assert (proof.carried, proof.difference) == (1, 0.0)
        assert (proof.carried_difference < 1e-5) is within


def test_a_prompt_that_is_trained_twice_or_left_out_is_missing() -> None:
    tokens = recorded_tokens(rollout([logprob(2.0)], [2]))
    group = tokens.groups[0][1]
    tokens.groups.append((2, group))
    assert tokens.verify(Fixed(0.0), 1.0).missing == 2  # place 0 is there twice, place 1 never


def recorded(**fault: Any) -> dict[str, Any]:
    proof = recorded_tokens(rollout([logprob(2.0)], [2])).verify(Fixed(0.0), 1.0)
    usual = {"phase": "/pause", "kind": "cut", "detected_by": "connection"}
    return {"not_met": 0, "proof": asdict(proof), "faults": [usual | fault]}


def test_a_run_is_wrong_when_a_fault_is_not_noticed_or_a_token_is_by_no_version() -> None:
    assert sync.verdict(recorded()) == []
    assert sync.verdict(recorded(detected_by=None)) == ["cut at /pause was not noticed"]
    wrong = recorded()
    wrong["proof"]["difference"] = 0.3
    assert "0.3 nats" in sync.verdict(wrong)[0]
