"""The files of docs/own_loss.md do what the page says, as they stand, on a real trainer."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lrl
from lrl.objectives import PPO, Tokens
from lrl.types import Group
from tests.policies import GROUPS, FakeStep, fit, opened, pack
from tests.tiny_policies import save_tiny

PAGE = (Path(__file__).parents[1] / "docs" / "own_loss.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))


@dataclass
class LeadingStep(FakeStep):
    """A step of rank 0, which has the groups."""

    groups: list[Group] = field(default_factory=lambda: GROUPS)
    step: int = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a file of the page."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module


def run(
    policy: lrl.PolicyModule, *callbacks: Callback, budget: int = 64, **settings: Any
) -> dict[str, float]:
    """Trains a step; returns its metrics."""
    step = LeadingStep(pack(GROUPS, budget))
    (found,) = fit(policy, [step], callbacks=callbacks, log_every_n_steps=1, **settings)
    return found


def test_the_clip_of_the_page_has_the_loss_and_the_gradient_of_ppo(folder: str, page: Any) -> None:
    own = page("clipped").Clipped(folder)
    shipped = lrl.PolicyModule(folder, objective=PPO())
    (micro,) = pack(GROUPS, 10_000)
    losses, gradients = [], []
    for policy in (own, shipped):
        policy.configure_model()
        loss = policy.compute_loss(micro)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([weight.grad for weight in policy.parameters()])
    assert losses[0] != 0
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_objective_of_the_page_halves_a_token_for_each_version_of_lag(
    folder: str, page: Any
) -> None:
    policy = opened(folder)
    (micro,) = pack(GROUPS, 10_000)
    fresh, old = (Tokens.select(policy(micro), micro, version) for version in (0, 3))
    losses = [page("halved").Halved().token_losses(tokens) for tokens in (fresh, old)]
    assert losses[0].any()
    torch.testing.assert_close(losses[1], losses[0] / 8)


def test_the_metric_of_the_page_is_a_mean_over_tokens_however_they_are_packed(
    folder: str, page: Any
) -> None:
    found = [
        run(page("measured").Measured(folder), budget=budget)["policy/surprise"]
        for budget in (40, 10_000)
    ]
    policy = opened(folder)
    (micro,) = pack(GROUPS, 10_000)
    whole = -micro.of_labels(policy(micro)).mean().item()
    assert found == pytest.approx([whole, whole])


def test_the_callback_of_the_page_draws_each_reward(folder: str, page: Any, tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path, name="", version="")
    run(lrl.PolicyModule(folder), page("reward_histogram").RewardHistogram(), logger=board)
    (event,) = EventAccumulator(str(tmp_path), {"histograms": 0}).Reload().Histograms("reward/each")
    assert event.step == 0
    assert event.histogram_value.num == sum(len(group.rewards) for group in GROUPS)


HOOKS = (
    *("on_train_batch_start", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end"),
)


def test_hooks_come_when_the_page_says_so(folder: str) -> None:
    class Policy(lrl.PolicyModule):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("it is called")

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("it is called")

    class Finds(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients = [weight.grad for weight in pl_module.parameters()]
            norm = torch.nn.utils.get_total_norm(gradients).item()
            assert norm == pytest.approx(1e-3, rel=1e-3)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            assert trainer.global_step == 1 and "policy/loss" in trainer.callback_metrics

    hooks, called = Callback(), list[str]()
    for name in HOOKS:
        setattr(hooks, name, lambda *_, name=name: called.append(name))
    run(Policy(folder, max_grad_norm=1e-3), hooks, Finds(), budget=40)
    passes = len(pack(GROUPS, 40))
    assert passes > 1
    assert called == [
        "on_train_batch_start",
        *["on_before_backward", "on_after_backward"] * passes,
        "on_before_optimizer_step",
        "on_train_batch_end",
    ]
