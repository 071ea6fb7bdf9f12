"""One run of `benchmarks.sharded`: some steps of given responses under one strategy, without
generators.

    python -m benchmarks.sharded_run POLICY FOLDER '{"strategy": "AsyncFSDP", "ranks": 2, "steps": 3, ...}'

Rank 0 starts the others. Each writes `rank-N.json`; rank 0 also writes the first step's gradient,
whole.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lrl
from benchmarks.ready_responses import Ready
from lrl.advantages import GroupMean
from lrl.callbacks import OnRankZero, WeightSync
from lrl.rollouts.learners import Learners
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import RankStream, StepLoader, StepStream
from lrl.system.stopwatch import Stopwatch
from lrl.training.sharding import on_cpu, whole_on_rank_0
from lrl.types import Group, Prompt, Rollout

GROUPS, RESPONSES = 4, 2
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 96
MICRO_BATCH_TOKENS = 256
"""Two responses: each of two ranks has two passes a step."""


def groups(step: int, vocabulary: int) -> Iterator[Group]:
    """Yields the made-up groups of a step, always the same."""
    draw = random.Random(step)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    for index in range(step * GROUPS, (step + 1) * GROUPS):
        rollouts = [
            Rollout(
                token_ids=tokens(RESPONSE_TOKENS),
                logprobs=[-10.0] * RESPONSE_TOKENS,
                versions=[step] * RESPONSE_TOKENS,
                finish_reason="length",
                reward=draw.random(),
            )
            for _ in range(RESPONSES)
        ]
        yield Group(
            index=index,
            prompt=Prompt(id=index, token_ids=tokens(PROMPT_TOKENS), text=""),
            rollouts=rollouts,
        )


def peak_bytes() -> int:
    """Returns the largest resident memory of this process since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def forget_peak() -> None:
    """Sets the peak to the memory of now."""
    Path("/proc/self/clear_refs").write_text("5")


class NoSync(WeightSync):
    """The place of the sync in a run without generators; it reads the weights as a sync does."""

    def __init__(self) -> None:
        super().__init__()
        self.read_s: list[float] = []
        self.read_bytes = 0

    def on_train_start(self, *args: Any) -> None:
        """Does nothing."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Reads all weights, one after the other, and keeps none."""
        started = time.perf_counter()
        self.read_bytes = sum(weight.nbytes for _, weight in pl_module.sent_weights())
        self.read_s.append(time.perf_counter() - started)

    def on_train_end(self, *args: Any) -> None:
        """Does nothing."""


class Measured(lrl.PolicyModule):
    """A policy whose passes and updates are timed, with the peaks of memory of loading, training
    and reading."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.step_s: list[float] = []
        self.peaks: dict[str, int] = {}
        self.gradient: dict[str, torch.Tensor] = {}

    def configure_model(self) -> None:
        """See `lrl.PolicyModule.configure_model`."""
        forget_peak()
        super().configure_model()
        self.peaks["load"] = peak_bytes()

    def training_step(self, step: Any, batch_idx: int) -> None:
        """See `lrl.PolicyModule.training_step`."""
        forget_peak()
        started = time.perf_counter()
        super().training_step(step, batch_idx)
        self.step_s.append(time.perf_counter() - started)
        self.peaks["step"] = max(self.peaks.get("step", 0), peak_bytes())
        forget_peak()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Keeps the first gradient."""
        if self.trainer.global_step == 0:
            named = (
                (name, weight.grad)
                for name, weight in self.named_parameters()
                if weight.grad is not None
            )
            self.gradient = on_cpu(
                (name, whole_on_rank_0(gradient).clone()) for name, gradient in named
            )


class ReadPeak(OnRankZero):
    """Keeps the peak of memory of a read of the weights."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Behind `NoSync`."""
        pl_module.peaks["read"] = max(pl_module.peaks.get("read", 0), peak_bytes())


def main(
    policy: str, folder: Path, strategy: str, ranks: int, steps: int, settings: dict[str, Any]
) -> None:
    """Runs the steps and writes what was measured."""
    torch.set_num_threads(1)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    sync = NoSync()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=getattr(lrl, strategy)(generator_devices=0, **settings),
        callbacks=[sync, ReadPeak()],
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Measured(policy, lr=1e-6)

    def next_step() -> StepStream | RankStream:
        if not trainer.is_global_zero:
            return RankStream(module)
        packer = Packer(
            MICRO_BATCH_TOKENS,
            GroupMean(),
            1.0,
            data_parallel_size=trainer.world_size,
            blanks=module.sharding is not None,
        )
        return StepStream(
            trainer.global_step,
            GROUPS,
            source=Ready(groups(trainer.global_step, module.network.config.vocab_size)),
            policy=module,
            learners=Learners(GroupMean()),
            packer=packer,
            stopwatch=Stopwatch(),
        )

    trainer.fit(module, StepLoader(10**6, next_step))
    found = {
        "step_s": module.step_s,
        "peaks": {name: peak - before for name, peak in module.peaks.items()},
        "read_s": sync.read_s,
        "read_bytes": sync.read_bytes,
    }
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(found))
    if trainer.is_global_zero:
        torch.save(module.gradient, folder / "gradient.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), **json.loads(sys.argv[3]))
