"""Runs on a real vLLM server that skip groups with equal rewards and keep cut responses out of the
loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lrl.callbacks import RolloutLog
from tests.lent_server import LentServer
from tests.runs.test_async_run import GROUPS, fit


class Seen(L.Callback):
    """Remembers what each step trained, masked and skipped; put it behind `RolloutLog`."""

    def __init__(self) -> None:
        self.trained: dict[int, list[int]] = {}
        self.skipped: list[int] = []
        self.counted: list[float] = []
        """The metric, step by step."""

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
        self.trained[stream.step] = [group.index for group in stream.groups]
        self.skipped = list(data.run.calls.controller.ledger.skipped)
        self.counted.append(float(trainer.callback_metrics.get("rollouts/skipped_groups", 0.0)))


def test_equal_groups_make_room_for_others_and_a_resume_knows_them(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "steps": 4,
        "max_lag": 1,
        "rewards": ["tests.odd_lengths:brevity_of_even_sums"],
        "max_skipped_per_step": 60,
        "mask_truncated": True,
    }
    saving = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    first, rest = Seen(), Seen()
    fit(lent_server, policy_folder, tmp_path, callbacks=[RolloutLog(), first, saving], **settings)
    path = str(next((tmp_path / "saved").glob("*step=2*")))
    fit(
        lent_server,
        policy_folder,
        tmp_path,
        callbacks=[RolloutLog(), rest],
        ckpt_path=path,
        **settings,
    )
    before = first.trained[0] + first.trained[1]
    for trained, skipped in (
        (sum(first.trained.values(), []), first.skipped),
        (before + sum(rest.trained.values(), []), rest.skipped),
    ):
        assert len(trained) == 4 * GROUPS and skipped
        assert sorted(trained + skipped) == list(range(len(trained) + len(skipped)))
    assert rest.counted[0] >= first.counted[1] > 0 and rest.counted[-1] == len(rest.skipped)
