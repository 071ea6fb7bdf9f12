"""A run that fits a sharded policy to given groups, without generators, and saves at every step.

Rank 0 writes the weights of policy and reference, whole, into `weights.pt`; each rank its own parts
into `ownRANK.pt`.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lrl
from lrl.callbacks import OnRankZero, Throughput, WeightSync
from lrl.checkpoints import checkpoint_folder
from lrl.training.pieces import whole_tensors
from lrl.training.sharding import Sharding, on_cpu
from lrl.weights import staging
from lrl.weights.staging import StageOrder
from tests.checkpoints.test_checkpoint_file import FullDisk
from tests.run_without_generators import StepsByVersion, trainer

PLACES: dict[str, tuple[Any, str]] = {
    "load": (Sharding, "fill"),
    "step": (lrl.PolicyModule, "compute_loss"),
    "sync": (staging, "_write_part"),
    "save": (checkpoint_folder, "save_parts"),
}
"""A function that every rank of a sharded run calls in each phase."""


def die_at(place: str, call: int, by: int) -> None:
    """Has this process get a signal at a call of the function of a place: killed by SIGKILL, it can
    clean up nothing; stopped by SIGSTOP, it keeps its connections and answers no more."""
    owner, name = PLACES[place]
    function, calls = getattr(owner, name), itertools.count(1)

    @functools.wraps(function)
    def dying(*args: Any, **settings: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), by)
        return function(*args, **settings)

    setattr(owner, name, dying)


class NoSync(WeightSync):
    def on_train_start(self, *args: Any) -> None: ...

    def on_train_batch_end(self, *args: Any) -> None: ...

    def on_train_end(self, *args: Any) -> None: ...


class NoTimes(Throughput):
    def on_train_start(self, *args: Any) -> None: ...

    def on_train_batch_end(self, *args: Any) -> None: ...


class StageWeights(OnRankZero):
    def __init__(self, deadline_s: float = 300.0) -> None:
        self.deadline_s = deadline_s

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        # A rank may write no file.
        with pl_module.ranks.within(self.deadline_s), suppress(OSError):
            pl_module.stage_weights(StageOrder("pool", None))


def make_policy(folder: str, adapters: bool, dtype: Any = "float32") -> Any:
    if dtype == "bfloat16":
        return lrl.PolicyModule(folder, lr=1e-5, dtype=dtype, reference=lrl.Reference())
    if adapters:
        torch.manual_seed(0)
        return lrl.PolicyModule(folder, lr=1e-2, lora=lrl.LoRA(rank=4), reference=lrl.Reference())
    return lrl.PolicyModule(folder, lr=1e-2, reference=lrl.Reference(refresh_every_n_steps=2))


def fit(
    folder: str,
    running: L.Trainer,
    ckpt_path: str | None = None,
    adapters: bool = False,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Fits a policy; returns the weights of policy and reference, whole, on rank 0, and this rank's
    own parts."""
    policy = make_policy(folder, adapters, dtype)
    running.fit(policy, datamodule=StepsByVersion(), ckpt_path=ckpt_path)
    reference = {} if adapters else on_cpu(whole_tensors(policy.reference.network))
    own = {name: getattr(one, "_local_tensor", one) for name, one in policy.named_parameters()}
    return {"policy": on_cpu(whole_tensors(policy)), "reference": reference, "own": own}


def main(
    folder: str,
    results: str,
    ranks: int,
    steps: int,
    ckpt_path: str | None = None,
    full_disk_at: int | None = None,
    dies_at: str | None = None,
    dies: int = 1,
    dies_by: int = signal.SIGKILL,
    adapters: bool = False,
    dtype: str = "float32",
    deadline_s: float = 300.0,
    **settings: Any,
) -> None:
    full = range(0) if full_disk_at is None else range(full_disk_at - 1, full_disk_at)
    running = trainer(
        Path(results),
        *(NoSync(), NoTimes(), StageWeights(deadline_s), FullDisk(full, rank=1, free=1000)),
        ModelCheckpoint(results, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        accelerator="cpu",
        devices=ranks,
        strategy=lrl.AsyncFSDP(generator_devices=0, **settings),
        max_steps=steps,
    )
    if dies_at is not None and running.global_rank == dies:
        die_at(dies_at, call=2, by=dies_by)
    found = fit(folder, running, ckpt_path, adapters, dtype)
    torch.save(found.pop("own"), Path(results) / f"own{running.global_rank}.pt")
    if running.is_global_zero:
        torch.save(found, Path(results) / "weights.pt")
