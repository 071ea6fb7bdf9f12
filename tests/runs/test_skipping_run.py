"""A run on a real vLLM server that skips groups with equal rewards, and keeps failed and cut
responses out of the loss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lrl.callbacks import RolloutLog, Summary
from lrl.callbacks.base import run_of
from tests.lent_server import LentServer
from tests.runs.test_async_run import GROUPS, RESPONSES, fit


class Seen(L.Callback):
    """Remembers what each step trained, masked and skipped; put it behind `RolloutLog`."""

    def __init__(self) -> None:
        self.trained: list[int] = []
        self.skipped: list[int] = []
        self.metrics: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        run = run_of(trainer)
        stream: Any = run.step_stream
        lone = stream.packer.discarded_groups  # all other responses have failed
        groups = [group for group in stream.groups if group.index not in lone]
        scored = [rollout for group in groups for rollout in group.scored]
        cut = sum(len(one.token_ids) for one in scored if one.finish_reason == "length")
        assert stream.packer.masked_tokens == cut
        assert stream.num_tokens == sum(len(one.token_ids) for one in scored) - cut
        assert all(len(set(group.rewards)) > 1 for group in groups)
        self.trained += [group.index for group in stream.groups]
        self.skipped = list(run.calls.controller.ledger.skipped)
        self.metrics = {tag: float(value) for tag, value in trainer.callback_metrics.items()}


def test_equal_groups_make_room_for_others_and_failed_responses_leave_the_others_their_rewards(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Seen()
    witness = fit(
        lent_server,
        policy_folder,
        tmp_path,
        callbacks=[RolloutLog(), seen, Summary()],
        steps=4,
        max_lag=1,
        rewards=["tests.odd_lengths:odd_lengths_of_even_sums"],
        max_reward_failures=1.0,
        max_skipped_per_step=60,
        mask_truncated=True,
    )
    done = seen.trained + seen.skipped
    assert len(seen.trained) == 4 * GROUPS and sorted(done) == list(range(len(done)))
    assert seen.metrics["rollouts/skipped_groups"] == len(seen.skipped) > 0
    rollouts = [rollout for _, rollout in witness.rollouts]
    even = [rollout for rollout in rollouts if len(rollout.text) % 2 == 0]
    assert len(rollouts) == 4 * GROUPS * RESPONSES and 0 < len(even) < len(rollouts)
    for rollout in rollouts:
        if rollout in even:
            assert rollout.reward is None and rollout.reward_failure.startswith("nan: ")
        else:
            assert rollout.reward == float(len(rollout.text))
    # Groups that are skipped, or of the next step, which is never trained, are counted, too.
    assert seen.metrics["rewards/nan"] == seen.metrics["rewards/retried"] >= len(even)
    assert re.search(r"without a reward +│ nan [1-9]", capsys.readouterr().out)
    assert not {"rewards/crash", "rewards/replaced"} & seen.metrics.keys()
