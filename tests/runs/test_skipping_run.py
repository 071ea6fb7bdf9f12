"""A run on a real vLLM server that skips groups with equal rewards and keeps cut responses out of
the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from lrl.callbacks import RolloutLog
from tests.lent_server import LentServer
from tests.runs.test_async_run import GROUPS, fit


class Seen(L.Callback):
    """Remembers what each step trained, masked and skipped; put it behind `RolloutLog`."""

    def __init__(self) -> None:
        self.trained: list[int] = []
        self.skipped: list[int] = []
        self.counted = 0.0
        """The metric."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        data = trainer.datamodule
        stream = data.run.step_stream
        rollouts = [rollout for group in stream.groups for rollout in group.rollouts]
        cut = sum(
            len(rollout.token_ids) for rollout in rollouts if rollout.finish_reason == "length"
        )
        assert stream.packer.masked_tokens == cut
        assert stream.num_tokens == sum(len(rollout.token_ids) for rollout in rollouts) - cut
        assert all(
            len({rollout.reward for rollout in group.rollouts}) > 1 for group in stream.groups
        )
        self.trained += [group.index for group in stream.groups]
        self.skipped = list(data.run.calls.controller.ledger.skipped)
        self.counted = float(trainer.callback_metrics.get("rollouts/skipped_groups", 0.0))


def test_equal_groups_make_room_for_others(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    seen = Seen()
    fit(
        lent_server,
        policy_folder,
        tmp_path,
        callbacks=[RolloutLog(), seen],
        steps=4,
        max_lag=1,
        rewards=["tests.odd_lengths:brevity_of_even_sums"],
        max_skipped_per_step=60,
        mask_truncated=True,
    )
    done = seen.trained + seen.skipped
    assert len(seen.trained) == 4 * GROUPS and sorted(done) == list(range(len(done)))
    assert seen.counted == len(seen.skipped) > 0
