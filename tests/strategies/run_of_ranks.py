"""Runs with several trainer ranks, or one: `fit` with given groups and no generators, `train` with a
server. Both are forked, or `main` is started for `tests.program` where Lightning starts the ranks.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.distributed_c10d import _get_default_group

import lrl
import lrl.system.ranks
from lrl.callbacks import Export, RolloutLog, Summary, Throughput, WeightSync
from lrl.callbacks.base import OnRankZero
from lrl.checkpoints import checkpoint_folder
from lrl.training.pieces import whole_tensors
from lrl.training.sharding import Sharding, on_cpu
from lrl.weights import staging
from lrl.weights.staging import StageOrder
from tests.leftovers import wait_for
from tests.lent_server import borrow
from tests.run_without_generators import StepsByVersion, trainer
from tests.strategies.step_of_ranks import whole

GROUPS = 4
PLACES: dict[str, tuple[Any, str]] = {
    "load": (Sharding, "fill"),
    "step": (lrl.PolicyModule, "compute_loss"),
    "sync": (staging, "_write_part"),
    "save": (checkpoint_folder, "save_parts"),
}
"""A function that every rank of a sharded run calls in each phase."""


class Telling(L.Callback):
    """Every rank prints a line for each step, with the sum of the weights of policy and reference,
    and what it trained; see `told`."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        found: dict[str, Any] = {"rank": trainer.global_rank, "step": trainer.global_step}
        networks = [pl_module, *([pl_module.reference.network] if pl_module.reference else [])]
        weights = [one for network in networks for one in network.parameters()]
        found["weights"] = sum(float(whole(one).double().sum()) for one in weights)
        if isinstance(pl_module, Counting):
            found |= pl_module.take() | of_run(trainer)
        line = f"step {trainer.global_step}: {json.dumps(found)}\n"
        os.write(1, line.encode())  # at once: print writes the end of a line by itself


def told(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in re.findall(r"^step \d+: (.*)$", text, re.MULTILINE)]


def of_run(trainer: L.Trainer) -> dict[str, Any]:
    """Of which groups a step was, which rank 0 knows, and how long a rank waits for another."""
    run = trainer.datamodule.run  # type: ignore[attr-defined]
    stream = run.step_stream if run.leads else None
    groups = stream.groups if stream else []
    versions = {one for group in groups for each in group.rollouts for one in each.versions}
    found = {
        "prompts": [group.prompt.id for group in groups],
        "lags": [stream.step - one for one in versions],
    }
    if torch.distributed.is_initialized():
        backend = _get_default_group()._get_backend(torch.device("cpu"))
        found["timeout_s"] = backend.options._timeout.total_seconds()
    return found


class WaitsAt(L.Callback):
    """Waits after a step until `go` is there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            wait_for(Path("go").exists, 600.0, "the test")


class DiesAt(L.Callback):
    """Has a rank get a signal at the second call of the function of a place: killed by SIGKILL, it
    can clean up nothing; stopped by SIGSTOP, it keeps its connections and answers no more."""

    def __init__(self, place: str, rank: int = 1, by: int = signal.SIGKILL) -> None:
        self.place = place
        self.rank = rank
        self.by = by

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        lrl.system.ranks.STOPPING_S = 4.0
        owner, name = PLACES[self.place]
        function, calls = getattr(owner, name), itertools.count(1)

        @functools.wraps(function)
        def dying(*args: Any, **settings: Any) -> Any:
            if next(calls) == 2:
                os.kill(os.getpid(), self.by)
            return function(*args, **settings)

        if trainer.global_rank == self.rank:
            setattr(owner, name, dying)


class NoSync(WeightSync):
    def on_train_start(self, *args: Any) -> None: ...

    def on_train_batch_end(self, *args: Any) -> None: ...

    def on_train_end(self, *args: Any) -> None: ...


class NoTimes(Throughput):
    def on_train_start(self, *args: Any) -> None: ...

    def on_train_batch_end(self, *args: Any) -> None: ...


class StageWeights(OnRankZero):
    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        # A rank may write no file.
        with pl_module.ranks.within(self.deadline_s), suppress(OSError):
            pl_module.stage_weights(StageOrder("pool", None))


def given_policy(model: str, adapters: bool = False, dtype: Any = "float32") -> lrl.PolicyModule:
    if dtype == "bfloat16":
        return lrl.PolicyModule(model, lr=1e-5, dtype=dtype, reference=lrl.Reference())
    if adapters:
        torch.manual_seed(0)
        return lrl.PolicyModule(model, lr=1e-2, lora=lrl.LoRA(rank=4), reference=lrl.Reference())
    return lrl.PolicyModule(model, lr=1e-2, reference=lrl.Reference(refresh_every_n_steps=2))


def weights_of(policy: Any) -> dict[str, Any]:
    """The weights of policy and reference, whole, on rank 0."""
    reference = {} if policy.lora else on_cpu(whole_tensors(policy.reference.network))
    return {"policy": on_cpu(whole_tensors(policy)), "reference": reference}


def fit(
    model: str,
    folder: str,
    *callbacks: L.Callback,
    ranks: int,
    steps: int,
    nodes: int = 1,
    strategy: str = "AsyncFSDP",
    ckpt_path: Any = None,
    deadline_s: float = 300.0,
    parts: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Fits a policy to given groups, without generators, and saves at every step.

    Rank 0 writes the weights of policy and reference, whole, into `weights.pt`; each rank its own
    parts into `ownRANK.pt`.
    """
    running = trainer(
        Path(folder),
        *(NoSync(), NoTimes(), StageWeights(deadline_s), *callbacks),
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        accelerator="cpu",
        devices=ranks // nodes,
        num_nodes=nodes,
        strategy=getattr(lrl, strategy)(generator_devices=0, **settings),
        max_steps=steps,
    )
    module = given_policy(model, **parts or {})
    running.fit(module, datamodule=StepsByVersion(), ckpt_path=ckpt_path)
    found = weights_of(module)
    own = {name: getattr(one, "_local_tensor", one) for name, one in module.named_parameters()}
    torch.save(own, Path(folder) / f"own{running.global_rank}.pt")
    if running.is_global_zero:
        torch.save(found, Path(folder) / "weights.pt")


class Counting(lrl.PolicyModule):
    """Counts its passes, and remembers what of it was read, until that is taken."""

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

    def take(self) -> dict[str, Any]:
        found = {"passes": self.passes, "reads": self.reads}
        self.passes, self.reads = 0, []
        return found


class EndsAt(OnRankZero):
    """A callback of rank 0 alone, which ends the run after a step, or fails."""

    def __init__(self, step: int, error: str = "") -> None:
        self.step = step
        self.error = error

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and self.error:
            raise RuntimeError(self.error)
        trainer.should_stop = trainer.global_step == self.step


class StandsStill(lrl.AsyncDDP):
    """Its rank 0 stands still in its checks; the others tell when they wait for it."""

    @contextmanager
    def meeting(self) -> Iterator[None]:
        if self.is_global_zero:
            time.sleep(600)
        with super().meeting():
            print("waits for rank 0:", os.getpid(), flush=True)
            yield


STRATEGIES: dict[str, Any] = {"StandsStill": StandsStill, "auto": lambda **settings: "auto"}


def train(
    model: str,
    folder: str,
    *callbacks: L.Callback,
    strategy: str = "AsyncSingleDevice",
    ranks: int = 1,
    steps: int = 1_000_000,
    ckpt_path: str | None = None,
) -> None:
    """Trains with generators of its own, or with those that are lent to this program."""
    make = STRATEGIES.get(strategy) or getattr(lrl, strategy)
    settings = lrl.ServerSettings(max_num_seqs=96, dtype="float32", kv_cache_gib=0.1)
    # A figure that only rank 0 has: all save at the same steps all the same.
    best: dict[str, Any] = {"monitor": "reward/mean", "mode": "max", "save_top_k": -1}
    running = trainer(
        Path(folder),
        *(WeightSync(), RolloutLog(), Throughput(), Export(f"{folder}/policy"), Summary()),
        *(Telling(), *callbacks),
        ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=2, **best),
        accelerator="cpu",
        devices=ranks + 1,
        strategy=make(server=settings),
        max_steps=steps,
    )
    data = lrl.RolloutDataModule(
        [{"prompt": f"{n}+1="} for n in range(10, 50)],
        # With brevity, a step of full-length responses has no gradient.
        ["tests.odd_lengths:variety"],
        groups_per_step=GROUPS,
        rollouts_per_group=4,
        max_lag=1,
        max_prompt_tokens=64,
        max_response_tokens=32,
        micro_batch_tokens=128,
    )
    running.fit(Counting(model, lr=1e-3), data, ckpt_path=ckpt_path)


def main(words: str) -> None:
    """`train`, with its arguments as JSON; `server` lends it one, and it ends behind step `ends_at`."""
    how = json.loads(words)
    if "server" in how:
        borrow(**how.pop("server"))
    callbacks = [EndsAt(how.pop("ends_at"))] if "ends_at" in how else []
    try:
        train(how.pop("model"), how.pop("folder"), *callbacks, **how)
    finally:
        print("is a rank of another process:", "LOCAL_RANK" in os.environ)
