"""A run with two trainer ranks, a process each, and the server of another process, for
`tests.program`.

Arguments: policy folder, run folder, steps, checkpoint or "", strategy, and where the server is, as
JSON. Every rank tells, step by step, what it trained; rank 0 also, of which groups it was. With
`STOP_AT` in the environment a callback of rank 0 ends it after that step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.tensor import DTensor

import lrl
from lrl.callbacks import Export, RolloutLog, Summary, Throughput, WeightSync
from lrl.callbacks.base import OnRankZero
from tests.lent_server import borrow
from tests.run_without_generators import trainer

RANKS = 2


class Counting(lrl.PolicyModule):
    passes = 0

    def configure_model(self) -> None:
        super().configure_model()
        self.reads: list[str] = []
        self.network.get_decoder().register_forward_pre_hook(
            lambda *_: None if torch.is_grad_enabled() else self.reads.append("log-probs")
        )
        self.network.register_state_dict_pre_hook(lambda *_: self.reads.append("weights"))

    def compute_loss(self, micro: Any) -> Any:
        self.passes += 1
        return super().compute_loss(micro)


class Telling(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        run = trainer.datamodule.run
        stream = run.step_stream if run.leads else None
        groups = stream.groups if stream else []
        line = {
            "step": trainer.global_step,
            "weights": sum(
                float(whole(weight).double().sum()) for weight in pl_module.parameters()
            ),
            "passes": pl_module.passes,
            "reads": pl_module.reads,
            "prompts": [group.prompt.id for group in groups],
            "timeout_s": _get_default_group()
            ._get_backend(pl_module.device)
            .options._timeout.total_seconds(),
            "lags": [
                stream.step - v for group in groups for one in group.rollouts for v in one.versions
            ],
        }
        pl_module.passes = 0
        pl_module.reads = []
        with (self.folder / f"rank-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}", flush=True)


class StopsAt(OnRankZero):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == int(os.environ.get("STOP_AT", 0))


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().full_tensor() if isinstance(weight, DTensor) else weight.detach()


def main(policy: str, run_folder: str, steps: str, checkpoint: str, kind: str, where: str) -> None:
    folder = Path(run_folder)
    borrow(**json.loads(where))
    settings = lrl.ServerSettings(max_num_seqs=96, dtype="float32")
    # A figure that only rank 0 has: both save at the same steps all the same.
    best: dict[str, Any] = {"monitor": "reward/mean", "mode": "max", "save_top_k": -1}
    running = trainer(
        folder,
        *(WeightSync(), RolloutLog(), Throughput(), Export(str(folder / "policy"))),
        *(Summary(), Telling(folder), StopsAt()),
        ModelCheckpoint(folder / "checkpoints", every_n_train_steps=2, **best),
        accelerator="cpu",
        devices=RANKS + 1,
        strategy=getattr(lrl, kind)(server=settings),
        max_steps=int(steps),
    )
    data = lrl.RolloutDataModule(
        [{"prompt": f"{n}+1="} for n in range(10, 50)],
        # With brevity, a step of full-length responses has no gradient.
        ["tests.odd_lengths:variety"],
        groups_per_step=4,
        rollouts_per_group=4,
        max_lag=1,
        max_prompt_tokens=64,
        max_response_tokens=32,
        micro_batch_tokens=128,
    )
    running.fit(Counting(policy, lr=1e-3), data, ckpt_path=checkpoint or None)
