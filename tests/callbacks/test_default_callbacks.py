"""The order of lrl's callbacks; ModelCheckpoint and EarlyStopping without a validation loop.

Covers callbacks/base.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lrl import callbacks as kinds_of
from lrl.callbacks import Evaluation
from lrl.callbacks.base import FollowRankZero, OnRankZero
from lrl.callbacks.default_callbacks import let_others_follow, put_in_order
from tests.callbacks import scripted


class Users(L.Callback):
    """A user's callback."""


def make(kind: Any) -> L.Callback:
    return Evaluation([{"prompt": "1+1="}]) if kind is Evaluation else kind()


ORDER = "WeightSync Evaluation RolloutLog Throughput Timeline Health Progress Export Summary"
KINDS: list[Any] = [getattr(kinds_of, name) for name in ORDER.split()]


@given(st.permutations([*KINDS, Users, Users]))
def test_lrls_callbacks_have_one_order_and_a_users_own_stay_after_all_that_stood_before_them(
    kinds: list[type[L.Callback]],
) -> None:
    callbacks = [make(kind) for kind in kinds]
    users = [place for place, one in enumerate(callbacks) if isinstance(one, Users)]
    before = {callbacks[place]: set(callbacks[:place]) for place in users}
    put_in_order(callbacks)
    assert [type(one) for one in callbacks if not isinstance(one, Users)] == KINDS
    assert all(those <= set(callbacks[: callbacks.index(one)]) for one, those in before.items())


def once(kind: Any) -> object:
    return object() if kind is Users else kind


@given(st.lists(st.sampled_from([*KINDS, Users]), unique_by=once))
def test_other_ranks_follow_each_row_of_rank_zeros_callbacks_and_lack_nothing_else(
    kinds: list[Any],
) -> None:
    callbacks = [make(kind) for kind in kinds]
    on_rank_zero, on_another = list(callbacks), list(callbacks)
    let_others_follow(on_rank_zero, leads=True)
    let_others_follow(on_another, leads=False)
    assert [one for one in on_rank_zero if not isinstance(one, FollowRankZero)] == callbacks
    assert [one for one in on_another if not isinstance(one, FollowRankZero)] == [
        one for one in callbacks if not isinstance(one, OnRankZero)
    ]
    meetings = [one for one in on_rank_zero if isinstance(one, FollowRankZero)]
    assert [one.last for one in meetings] == [False] * (len(meetings) - 1) + [True] * bool(meetings)
    assert run_by_all(on_rank_zero) == run_by_all(on_another)


def run_by_all(callbacks: list[L.Callback]) -> list[str]:
    """Returns what all ranks run, in order."""
    return [type(one).__name__ for one in callbacks if not isinstance(one, OnRankZero)]


STEPS = 8
ACCURACY = {0: 0.1, 2: 0.5, 5: 0.4, STEPS: 0.3}
"""By the step at which an evaluation ends; no epoch ends within the run."""


class Evaluates(L.Callback):
    """Gives a run the metrics that `Evaluation` would give it."""

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._evaluate(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step < STEPS:
            self._evaluate(trainer)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._evaluate(trainer)

    def _evaluate(self, trainer: L.Trainer) -> None:
        if (accuracy := ACCURACY.get(trainer.global_step)) is not None:
            trainer.callback_metrics["eval/held/accuracy"] = torch.tensor(accuracy)


def fit(*callbacks: L.Callback, rewards: Sequence[float] = range(STEPS)) -> L.Trainer:
    rows = [{"reward/mean": float(reward)} for reward in rewards]
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return scripted.fit(rows, Evaluates(), *callbacks, enable_checkpointing=saves)


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({"mode": "max"}, ["step=2"]),
        ({"mode": "min", "save_top_k": 1}, [f"step={STEPS}"]),
        ({"save_top_k": -1}, ["step=2", "step=5", "step=8"]),
    ],
    ids=["the best", "the last, if it is the best", "each once"],
)
def test_checkpoints_by_an_evaluation_are_kept(
    how: dict[str, Any], kept: list[str], tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, monitor="eval/held/accuracy", filename="{step}", **how)
    fit(saving)
    assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == kept
    if how.get("mode") == "max":
        assert float(saving.best_model_score) == pytest.approx(0.5)


def test_a_run_stops_when_its_evaluations_get_no_better() -> None:
    stopping = EarlyStopping("eval/held/accuracy", mode="max", patience=1)
    assert fit(stopping).global_step == 5


def test_a_callback_that_asks_for_the_end_of_an_epoch_gets_it() -> None:
    stopping = EarlyStopping("reward/mean", mode="max", patience=1, check_on_train_epoch_end=True)
    assert fit(stopping, rewards=[9.0, *[0.0] * (STEPS - 1)]).global_step == STEPS


def test_a_figure_that_the_first_step_does_not_log_is_said_with_the_nearest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit(EarlyStopping("eval/hold/accuracy", patience=1, strict=False))
    (text,) = (
        one.getMessage() for one in caplog.records if one.name == "lrl.callbacks.default_callbacks"
    )
    assert text.startswith("EarlyStopping.monitor is 'eval/hold/accuracy'")
    assert text.endswith("Did you mean eval/held/accuracy?")
