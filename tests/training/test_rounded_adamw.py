"""bfloat16 weights learn at learning rates that are far below their distance of two numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import lrl
from lrl.training.merging import rounded
from lrl.training.rounded_adamw import SLICE, RoundedAdamW
from tests.policies import GROUPS, SIZES, FakeStep, Steps, pack, save_model, trainer

LR = 1e-6
STEPS = 6


class Nearest(lrl.PolicyModule):
    """A policy with torch's AdamW whatever the weights are."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr, self.betas, weight_decay=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("policy"), LlamaConfig(**SIZES))


def fit(policy: lrl.PolicyModule, steps: int = STEPS, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    path = settings.pop("ckpt_path", None)
    running = trainer(max_steps=steps, max_epochs=-1, **settings)
    running.fit(policy, Steps([FakeStep(pack(GROUPS))] * STEPS), ckpt_path=path, weights_only=True)
    return running


def numbers(policy: lrl.PolicyModule) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


def moved(kind: type[lrl.PolicyModule], folder: str, dtype: Any) -> Tensor:
    """The change of all weights over a run, float64; both dtypes begin with the same numbers."""
    policy = kind(folder, lr=LR, dtype=dtype)
    policy.configure_model()
    for weight in policy.parameters():
        weight.data = weight.data.bfloat16().to(weight.dtype)
    before = numbers(policy).double()
    fit(policy)
    return numbers(policy).double() - before


def test_weights_in_bfloat16_move_as_those_in_float32_do(folder: str) -> None:
    exact = moved(lrl.PolicyModule, folder, "float32")

    def share(change: Tensor) -> float:
        return (change @ exact / (exact @ exact)).item()

    assert share(moved(lrl.PolicyModule, folder, "bfloat16")) == pytest.approx(1.0, abs=0.15)
    assert share(moved(Nearest, folder, "bfloat16")) < 0.3, "nearly all of it is lost"


@pytest.mark.parametrize("fused", [None, True])
def test_an_update_of_float32_weights_is_torchs(fused: bool | None) -> None:
    ours, theirs = (
        [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in (7, 12)] for _ in range(2)
    )
    how: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3, "fused": fused}
    optimizers = RoundedAdamW(ours, seed=0, **how), torch.optim.AdamW(theirs, **how)
    for step in range(3):
        for weights, optimizer in zip((ours, theirs), optimizers, strict=True):
            for weight in weights:
                weight.grad = torch.sin(weight.detach() + step)
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("fused", [None, True])
def test_moments_in_bfloat16_follow_the_gradient_down(fused: bool | None) -> None:
    """To the nearest number a decay of 1/1000 would leave the second moment as it was."""
    weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = RoundedAdamW([weight], seed=0, lr=0.0, betas=(0.9, 0.999), fused=fused)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.grad = torch.zeros_like(weight)
    for _ in range(99):
        optimizer.step()
    square = optimizer.state[weight]["exp_avg_sq"]
    assert square.dtype == torch.bfloat16
    assert square.double().mean().item() == pytest.approx(1e-3 * 0.999**99, rel=2e-3)
    assert torch.equal(weight, torch.ones_like(weight))


def test_slices_of_a_weight_have_draws_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def draw(weight: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
        seeds.append(seed)
        return rounded(weight, dtype, seed)

    monkeypatch.setattr("lrl.training.rounded_adamw.rounded", draw)
    monkeypatch.setattr("lrl.training.rounded_adamw.SLICE", 4)
    weights = [torch.nn.Parameter(torch.ones(2, 4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = RoundedAdamW(weights, seed=0)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert len(set(seeds)) == len(seeds) == 3 * 2 * 2 * 3, "steps, weights, slices, and numbers"
    assert SLICE > 4


def test_a_run_in_bfloat16_resumes_exactly(folder: str, tmp_path: Path) -> None:
    whole, resumed = (lrl.PolicyModule(folder, lr=LR, dtype="bfloat16") for _ in range(2))
    fit(whole, saves_in=tmp_path)
    fit(resumed, seed=7, ckpt_path=str(tmp_path / "step=2.ckpt"))
    assert torch.equal(numbers(whole), numbers(resumed)), "the draws are the checkpoint's"
    other = lrl.PolicyModule(folder, lr=LR, dtype="bfloat16")
    fit(other, seed=7)
    assert not torch.equal(numbers(whole), numbers(other))


def test_sent_weights_are_those_that_compute(folder: str) -> None:
    policy = lrl.PolicyModule(folder, lr=1e-3, dtype="bfloat16")
    fit(policy)
    assert {weight.dtype for _, weight in policy.whole_weights()} == {torch.bfloat16}
    text = [1, 2, 3, 4]
    assert policy.prompt_logprobs(text) == policy.prompt_logprobs(text, None, "bfloat16")
