"""Whole runs on a real vLLM server: failed responses are left out and counted, and too many of them
end the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lrl.callbacks import RolloutLog, Summary
from tests.lent_server import LentServer
from tests.runs.test_async_run import GROUPS, RESPONSES, fit


class Logged(L.Callback):
    """Metrics of the last step; put it behind `RolloutLog`."""

    metrics: dict[str, float]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.metrics = {tag: float(value) for tag, value in trainer.callback_metrics.items()}


def test_failed_responses_are_counted_by_kind_and_leave_the_others_their_rewards(
    lent_server: LentServer,
    policy_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    logged = Logged()
    settings: dict[str, Any] = {
        "rewards": ["tests.odd_lengths:nan_if_even"],
        "max_reward_failures": 1.0,
    }
    callbacks = [RolloutLog(), logged, Summary()]
    run = fit(lent_server, policy_folder, tmp_path, steps=2, callbacks=callbacks, **settings)
    rollouts = [rollout for _, rollout in run.rollouts]
    even = [rollout for rollout in rollouts if len(rollout.text) % 2 == 0]
    assert len(rollouts) == 2 * GROUPS * RESPONSES and 0 < len(even) < len(rollouts)
    assert all(
        rollout.reward is None and rollout.reward_failure.startswith("nan: ") for rollout in even
    )
    assert all(
        rollout.reward == float(len(rollout.text)) for rollout in rollouts if rollout not in even
    )
    # Groups of the next step, which is never trained, are counted, too.
    assert logged.metrics["rewards/nan"] == logged.metrics["rewards/retried"] >= len(even)
    assert re.search(r"without a reward +│ nan [1-9]", capsys.readouterr().out)
    assert not {"rewards/crash", "rewards/replaced"} & logged.metrics.keys()
