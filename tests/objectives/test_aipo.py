"""AIPO against plain arithmetic, and the numbers reported about a step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.objectives import AIPO, Diagnostics

logprob = st.floats(-8, 0, width=32)
token = st.tuples(logprob, logprob, st.floats(-3, 3, width=32), st.booleans())


def plain(logprob: float, behaviour: float, advantage: float, rho: float) -> tuple[float, float]:
    """Loss and its derivative by the log-prob, in Python floats: -min(pi / mu, rho) * A * log pi, weight held fixed."""
    weight = min(math.exp(logprob) / math.exp(behaviour), rho)
    return -weight * advantage * logprob, -weight * advantage


@settings(max_examples=100, deadline=None)
@given(st.lists(token, min_size=1, max_size=12), st.sampled_from([1.0, 2.0, 4.0, 10.0]))
def test_value_and_gradient_are_the_formula(tokens: list[tuple[float, float, float, bool]], rho: float) -> None:
    logprobs, behaviour, advantages, mask = (torch.tensor(column)[None] for column in zip(*tokens, strict=True))
    logprobs.requires_grad_()
    losses = AIPO(rho)(logprobs, behaviour, advantages, mask, torch.zeros_like(mask, dtype=torch.int64))
    losses.sum().backward()
    for i, (pi, mu, advantage, trained) in enumerate(tokens):
        loss, gradient = plain(pi, mu, advantage, rho) if trained else (0.0, 0.0)
        assert losses[0, i].item() == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert logprobs.grad[0, i].item() == pytest.approx(gradient, rel=1e-4, abs=1e-6)


def test_a_truncated_token_still_learns_with_weight_rho() -> None:
    logprobs = torch.tensor([[-0.1]], requires_grad=True)
    AIPO(2.0)(
        logprobs, torch.tensor([[-5.0]]), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1).long()
    ).sum().backward()
    assert logprobs.grad.item() == pytest.approx(-2.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_masked_has_no_effect(poison: float) -> None:
    mask = torch.tensor([[True, False, True]])
    clean = [torch.tensor([[-1.0, 0.0, -2.0]]), torch.tensor([[-1.5, 0.0, -1.0]]), torch.tensor([[1.0, 0.0, -1.0]])]
    dirty = [tensor.masked_fill(~mask, poison).requires_grad_() for tensor in clean]
    clean[0].requires_grad_()
    versions = torch.zeros(1, 3, dtype=torch.int64)
    losses = [AIPO()(*tensors, mask, versions) for tensors in (clean, dirty)]
    for loss in losses:
        loss.sum().backward()
    assert torch.equal(*losses)
    assert torch.equal(clean[0].grad, dirty[0].grad)


def test_an_extreme_ratio_stays_finite() -> None:
    logprobs = torch.tensor([[0.0, -300.0]], requires_grad=True)
    fields = (
        torch.tensor([[-300.0, 0.0]]),
        torch.zeros(1, 2),
        torch.ones(1, 2, dtype=torch.bool),
        torch.zeros(1, 2).long(),
    )
    loss = AIPO()(logprobs, *fields).sum()
    loss.backward()
    diagnostics = Diagnostics(version=0)
    diagnostics.add(AIPO(), logprobs, *fields)
    assert loss.item() == 0 and torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(value) for value in diagnostics.result().values())


@pytest.mark.parametrize("rho", [0.5, 0.0, -1.0, math.nan])
def test_a_rho_that_cuts_on_policy_tokens_is_refused(rho: float) -> None:
    with pytest.raises(ValueError, match=r"rho must be at least 1.*\[2, 10\]"):
        AIPO(rho)


@settings(max_examples=50, deadline=None)
@given(st.lists(token, min_size=2, max_size=12), st.integers(1, 11))
def test_diagnostics_do_not_depend_on_micro_batches(tokens: list[tuple[float, float, float, bool]], cut: int) -> None:
    columns = [torch.tensor(column)[None] for column in zip(*tokens, strict=True)]
    columns.append(torch.arange(len(tokens))[None] % 3)
    whole, parts = Diagnostics(version=5), Diagnostics(version=5)
    whole.add(AIPO(2.0), *columns)
    parts.add(AIPO(2.0), *(column[:, :cut] for column in columns))
    parts.add(AIPO(2.0), *(column[:, cut:] for column in columns))
    assert parts.result() == pytest.approx(whole.result(), rel=1e-4, abs=1e-6)


def test_diagnostics_are_what_they_are_called() -> None:
    mask = torch.tensor([[True, True, False]])
    logprobs, behaviour = torch.tensor([[0.0, -1.0, -9.0]]), torch.tensor([[-math.log(3), -1.0, 0.0]])
    diagnostics = Diagnostics(version=5)
    diagnostics.add(AIPO(2.0), logprobs, behaviour, torch.ones(1, 3), mask, torch.tensor([[3, 5, -1]]))
    assert diagnostics.result() == pytest.approx(
        {
            "ratio_mean": 2.0,
            "ratio_max": 3.0,
            "clip_fraction": 0.5,
            "ess": 4.0**2 / (2 * 10.0),
            "kl_behaviour": (3 - 1 - math.log(3)) / 2,
            "lag_mean": 1.0,
            "lag_max": 2.0,
        }
    )


def test_a_step_without_tokens_reports_nothing() -> None:
    assert Diagnostics(version=0).result() == {}
