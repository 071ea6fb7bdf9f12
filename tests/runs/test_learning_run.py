"""What learning needs beyond a plain run, on a real vLLM server: reference, replay, baselines that
remember."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

import lrl
from tests.lent_server import LentServer
from tests.runs.test_async_run import fit


class Replayed(L.Callback):
    """Remembers the groups that each step has trained again."""

    def __init__(self) -> None:
        self.steps: dict[int, list[int]] = {}
        self.oldest: dict[int, int] = {}
        self.metrics: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        stream = trainer.datamodule.run.step_stream
        self.steps[stream.step] = [group.index for group in stream.replayed]
        self.oldest[stream.step] = min(
            (group.oldest_version for group in stream.replayed), default=stream.step
        )
        self.metrics[stream.step] = {
            name: float(value) for name, value in trainer.callback_metrics.items()
        }


def test_replayed_groups_are_trained_before_and_stay_within_their_own_bound(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "max_lag": 0,
        "replay": lrl.Replay(3, max_lag=2),
        "learning": {
            "objective": lrl.objectives.TBA(beta=0.1),
            "reference": lrl.Reference(refresh_every_n_steps=2),
        },
    }
    seen = Replayed()
    witness = fit(lent_server, policy_folder, tmp_path, callbacks=[seen], **settings)
    trained = {group.index: step for step, group in witness.groups}
    assert seen.steps[0] == [] and all(
        len(drawn) == 3 for step, drawn in seen.steps.items() if step > 1
    )
    for step, drawn in seen.steps.items():
        assert all(trained[index] < step for index in drawn)
        assert step - seen.oldest[step] <= 2
        assert seen.metrics[step]["policy/lag_max"] == step - seen.oldest[step]
    assert len(trained) == len(witness.groups), "no group is fresh twice"
    assert all("policy/kl_reference" in metrics for metrics in seen.metrics.values())


def test_adapters_are_trained_and_every_sync_of_them_is_proved(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    seen = Replayed()
    learning = {"lora": lrl.LoRA(rank=4), "reference": lrl.Reference()}
    witness = fit(
        lent_server, policy_folder, tmp_path, callbacks=[seen], max_lag=1, learning=learning
    )
    assert max(version for _, rollout in witness.rollouts for version in rollout.versions) >= 1
    kl = [seen.metrics[step]["policy/kl_reference"] for step in sorted(seen.metrics)]
    assert kl[0] == 0.0 < kl[-1], "the reference is the policy without its adapters"
    assert all(metrics["policy/mismatch_kl"] < 1e-4 for metrics in seen.metrics.values())
