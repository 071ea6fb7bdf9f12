"""A run which the tests end, for `tests.program`. Arguments: policy folder, run folder, failing
step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L

import lrl
from lrl.callbacks import WeightSync
from tests.run_without_generators import trainer


class Report(L.Callback):
    def __init__(self, fail_at: int) -> None:
        self.fail_at = fail_at

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        sys.stdout.write(f"step {trainer.global_step}\n")
        sys.stdout.flush()
        if trainer.global_step == self.fail_at:
            raise RuntimeError("the module fails")


def main(policy: str, folder: str, fail_at: str) -> None:
    settings = lrl.ServerSettings(max_num_seqs=8, kv_cache_gib=0.1)
    running = trainer(
        Path(folder),
        *(WeightSync(), Report(int(fail_at))),
        accelerator="cpu",
        devices=2,
        strategy=lrl.AsyncSingleDevice(server=settings),
        max_steps=1_000_000,
    )
    data = lrl.RolloutDataModule(
        [{"prompt": f"{n}+1="} for n in range(10, 99)],
        ["tests.odd_lengths:brevity"],
        groups_per_step=2,
        rollouts_per_group=2,
        max_prompt_tokens=64,
        max_response_tokens=32,
    )
    running.fit(lrl.PolicyModule(policy), data)
