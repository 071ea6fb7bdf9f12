"""A user's own optimizer and scheduler: lrl steps them and changes nothing in them; and bfloat16
weights, which learn at learning rates far below their distance of two numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

import lrl
from lrl.training.optimizers import RoundedAdamW, scale_and_clip
from tests.policies import GROUPS, FakeStep, fit, flat, pack
from tests.tiny_policies import save_tiny

EPOCH = 3
"""Steps in an epoch."""
STEPS = 8


Configured = Callable[[lrl.PolicyModule], Any]


def groups_with_own_settings(policy: lrl.PolicyModule) -> Any:
    frozen, others = (list(layer.parameters()) for layer in policy.network.model.layers)
    groups = [{"params": frozen, "lr": 0.0}, {"params": others, "lr": 1e-2, "weight_decay": 0.5}]
    return AdamW(groups, betas=(0.5, 0.6))


def with_scheduler(make: Callable[[Optimizer], Any], **how: Any) -> Configured:
    def configure(policy: lrl.PolicyModule) -> Any:
        optimizer = SGD(policy.parameters(), lr=0.8)
        scheduler = make(optimizer)
        if not how:
            return [optimizer], [scheduler]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **how}}

    return configure


def halved(optimizer: Optimizer) -> Any:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def in_a_row(optimizer: Optimizer) -> Any:
    parts = [
        LinearLR(optimizer, 0.25, 1.0, total_iters=2),
        StepLR(optimizer, step_size=1, gamma=0.5),
    ]
    return SequentialLR(optimizer, parts, milestones=[3])


CASES: dict[str, tuple[Configured, list[float]]] = {
    "an epoch's scheduler": (with_scheduler(halved), [0.8] * 3 + [0.4] * 3 + [0.2] * 2),
    "every third step's": (
        with_scheduler(halved, interval="step", frequency=3),
        [0.8] * 3 + [0.4] * 3 + [0.2] * 2,
    ),
    "two in a row": (
        with_scheduler(in_a_row, interval="step"),
        [0.2, 0.5, 0.8, 0.8, 0.4, 0.2, 0.1, 0.05],
    ),
    "groups of their own": (groups_with_own_settings, [0.0] * STEPS),
}


class Own(lrl.PolicyModule):
    """A policy with a user's optimizer."""

    def __init__(self, folder: str, configure: Configured) -> None:
        super().__init__(folder, lr=1e-3, weight_decay=0.1)
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def lrs_of(policy: lrl.PolicyModule, steps: int, *how: Any, **settings: Any) -> list[float]:
    """Trains up to `steps`, over epochs; returns the learning rate of each step."""
    epoch = [FakeStep(pack(GROUPS))] * EPOCH
    rows = fit(policy, epoch, *how, max_steps=steps, max_epochs=-1, **settings)
    return [row["policy/lr"] for row in rows]


@pytest.mark.parametrize("case", CASES)
def test_a_users_optimizer_and_scheduler_are_stepped_not_changed_and_resumed_exactly(
    case: str, folder: str, tmp_path: Path
) -> None:
    configure, lrs = CASES[case]
    whole = Own(folder, configure)
    found = lrs_of(whole, STEPS, saves_in=tmp_path)
    groups = whole.trainer.optimizers[0].param_groups
    assert found == pytest.approx(lrs)
    if case == "groups of their own":
        assert [group["weight_decay"] for group in groups] == [0.01, 0.5]
        assert [group["betas"] for group in groups] == [(0.5, 0.6)] * 2
    else:
        assert groups[0]["weight_decay"] == 0
    for at in (2, EPOCH):
        resumed = Own(folder, configure)
        assert lrs_of(resumed, STEPS, str(tmp_path / f"step={at}.ckpt")) == found[at:]
        assert torch.equal(weights_of(resumed), weights_of(whole))


def by_the_loss(optimizer: Optimizer) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_scaling_and_clipping_at_once_is_scaling_and_then_torchs_clipping(
    kind: torch.dtype, max_norm: float | None
) -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.zeros(size, 3, dtype=kind)) for size in range(1, 9)]
    for weight in ours[1:]:
        weight.grad = torch.randn_like(weight)
    theirs = copy.deepcopy(ours)
    for weight, one in zip(theirs, ours, strict=True):
        weight.grad = None if one.grad is None else 0.37 * one.grad
    wanted = torch.nn.utils.clip_grad_norm_(theirs, math.inf if max_norm is None else max_norm)
    found = scale_and_clip(ours, 0.37, max_norm)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[kind]
    torch.testing.assert_close(found, wanted.float(), rtol=rounding, atol=0)
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2 * rounding, atol=1e-7)
    assert ours[0].grad is None


def two(policy: lrl.PolicyModule) -> Any:
    parts = policy.network.model, policy.network.lm_head
    return [SGD(part.parameters(), lr=0.1) for part in parts], []


@pytest.mark.parametrize(
    ("configure", "text"),
    [
        (two, "gives 2 optimizers: give one"),
        (with_scheduler(by_the_loss), "ReduceLROnPlateau.*lr_scheduler_step"),
        (
            lambda policy: SGD(policy.network.parameters(), lr=0.1),
            "no group with the weights of model.critic.*add one",
        ),
    ],
    ids=["two optimizers", "a plateau", "no critic"],
)
def test_an_optimizer_that_a_step_cannot_use_is_refused(
    folder: str, configure: Configured, text: str
) -> None:
    policy = Own(folder, configure)
    if "critic" in text:
        policy.critic = lrl.Critic()
    with pytest.raises(ValueError, match=text):
        lrs_of(policy, 1, strategy=lrl.AsyncSingleDevice(), devices=2)


def test_a_scheduler_that_needs_a_metric_gets_it_from_the_users_hook(folder: str) -> None:
    class Judged(Own):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(1.0)  # never better than the first time

    policy = Judged(folder, with_scheduler(by_the_loss, interval="step"))
    assert lrs_of(policy, 3) == pytest.approx([0.8, 0.8, 0.4])


# ---- AdamW for bfloat16 weights

LR = 1e-6


def weights_of(policy: lrl.PolicyModule) -> Tensor:
    return flat(policy.parameters())


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("new"))


class Nearest(lrl.PolicyModule):
    """A policy with torch's AdamW whatever the weights are."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr, self.betas, weight_decay=0.0)


def seeded(policy: lrl.PolicyModule, seed: int = 0, **settings: Any) -> None:
    torch.manual_seed(seed)
    lrs_of(policy, 6, **settings)


def moved(kind: type[lrl.PolicyModule], folder: str, dtype: Any) -> Tensor:
    """The change of all weights over a run, float64; both dtypes begin with the same numbers."""
    policy = kind(folder, lr=LR, dtype=dtype)
    policy.configure_model()
    for weight in policy.parameters():
        weight.data = weight.data.bfloat16().to(weight.dtype)
    before = weights_of(policy).double()
    seeded(policy)
    return weights_of(policy).double() - before


def test_weights_in_bfloat16_move_as_those_in_float32_do(new_model: str) -> None:
    exact = moved(lrl.PolicyModule, new_model, "float32")

    def share(change: Tensor) -> float:
        return (change @ exact / (exact @ exact)).item()

    assert share(moved(lrl.PolicyModule, new_model, "bfloat16")) == pytest.approx(1.0, abs=0.15)
    assert share(moved(Nearest, new_model, "bfloat16")) < 0.3, "nearly all of it is lost"


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


def test_a_run_in_bfloat16_resumes_exactly(new_model: str, tmp_path: Path) -> None:
    whole, resumed = (lrl.PolicyModule(new_model, lr=LR, dtype="bfloat16") for _ in range(2))
    seeded(whole, saves_in=tmp_path)
    seeded(resumed, seed=7, ckpt_path=str(tmp_path / "step=2.ckpt"))
    assert torch.equal(weights_of(whole), weights_of(resumed)), "the draws are the checkpoint's"
    other = lrl.PolicyModule(new_model, lr=LR, dtype="bfloat16")
    seeded(other, seed=7)
    assert not torch.equal(weights_of(whole), weights_of(other))
