"""A user's own optimizer and scheduler: lrl steps them and changes nothing in them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

import lrl
from lrl.training.optimizers import scale_and_clip
from tests.policies import GROUPS, FakeStep, Steps, pack, trainer

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
    "no scheduler": (lambda policy: SGD(policy.parameters(), lr=0.8), [0.8] * STEPS),
    "an epoch's scheduler": (with_scheduler(halved), [0.8] * 3 + [0.4] * 3 + [0.2] * 2),
    "every other epoch's": (
        with_scheduler(halved, interval="epoch", frequency=2),
        [0.8] * 6 + [0.4] * 2,
    ),
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
        self.lrs: list[float] = []

    def configure_optimizers(self) -> Any:
        return self.configure(self)

    def on_train_batch_end(self, *_: Any) -> None:
        self.lrs.append(float(self.trainer.callback_metrics["policy/lr"]))


def fit(
    policy: lrl.PolicyModule, steps: int, ckpt_path: str | None = None, **settings: Any
) -> L.Trainer:
    running = trainer(max_steps=steps, max_epochs=-1, **settings)
    steps_of_epoch = Steps([FakeStep(pack(GROUPS))] * EPOCH)
    running.fit(policy, steps_of_epoch, ckpt_path=ckpt_path, weights_only=True)
    return running


@pytest.mark.parametrize("case", CASES)
def test_a_users_optimizer_and_scheduler_are_stepped_and_not_changed(
    case: str, folder: str
) -> None:
    configure, lrs = CASES[case]
    policy = Own(folder, configure)
    running = fit(policy, STEPS)
    assert policy.lrs == pytest.approx(lrs)
    optimizer = running.optimizers[0]
    if case == "groups of their own":
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.5]
        assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.6)] * 2
    else:
        assert optimizer.param_groups[0]["weight_decay"] == 0


@pytest.fixture(scope="module", params=CASES)
def saved(
    request: pytest.FixtureRequest, folder: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Own, Configured, Path]:
    """A whole run of each case, how it is configured, and the folder with a checkpoint of each of
    its steps."""
    (configure, _), checkpoints = CASES[request.param], tmp_path_factory.mktemp("checkpoints")
    whole = Own(folder, configure)
    fit(whole, STEPS, saves_in=checkpoints)
    return whole, configure, checkpoints


@pytest.mark.parametrize("at", [2, 3])
def test_a_run_with_a_users_optimizer_resumes_exactly(
    saved: tuple[Own, Configured, Path], at: int, folder: str
) -> None:
    whole, configure, checkpoints = saved
    resumed = Own(folder, configure)
    fit(resumed, STEPS, ckpt_path=str(checkpoints / f"step={at}.ckpt"))
    assert resumed.lrs == whole.lrs[at:]
    for (_, one), (_, other) in zip(whole.whole_weights(), resumed.whole_weights(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


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
        fit(policy, 1, strategy=lrl.AsyncSingleDevice(), devices=2)


def test_a_scheduler_that_needs_a_metric_gets_it_from_the_users_hook(folder: str) -> None:
    class Judged(Own):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(1.0)  # never better than the first time

    policy = Judged(folder, with_scheduler(by_the_loss, interval="step"))
    fit(policy, 3)
    assert policy.lrs == pytest.approx([0.8, 0.8, 0.4])
