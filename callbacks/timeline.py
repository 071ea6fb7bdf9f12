"""Timeline of a run (`lrl.planning.profiling.timeline`), to which the simulator's costs are
fitted."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lrl.callbacks.base import OnRankZero
from lrl.callbacks.throughput import StepTimes, Throughput
from lrl.checkpoints.run_folder import run_folder
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.planning.profiling import timeline
from lrl.planning.profiling.intervals import SAMPLE_S, WorkIntervals
from lrl.planning.profiling.timeline import GeneratorRecord, MicroBatchRecord, StepRecord
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import StepStream
from lrl.system.best_effort import best_effort
from lrl.training.tree_cost import tree_lengths
from lrl.types import Group

log = logging.getLogger(__name__)


class Timeline(OnRankZero):
    """Writes `timeline.jsonl` into the run's folder, with the times of `Throughput`.

    A run that resumes in the same folder keeps the records up to its first step and removes later
    ones. On a GPU the trainer waits for the end of every backward pass, so that each pass has its
    own time.

    Args:
        planned_step_s: Seconds per step that `lrl plan` forecast; only `lrl plan --compare` reads
            it.

    Raises:
        ValueError: There is no `Throughput`.
    """

    def __init__(self, planned_step_s: float | None = None) -> None:
        self.planned_step_s = planned_step_s
        self._update = UpdateTimer()
        self._generators = GeneratorSampler()
        self._now_s = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raises ValueError without a `Throughput`, before a server starts."""
        Throughput.needed_by(self, trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keeps the records of finished steps and begins to sample the generators."""
        path = self.path(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        with best_effort("The timeline", path):
            known = timeline.truncate(path, trainer.global_step)
            self._now_s = known[-1].started_s + known[-1].seconds if known else 0.0
        self._update.attach(trainer.optimizers[0])
        self._generators.begin(trainer.datamodule.fleet)  # type: ignore[attr-defined]

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Waits for the end of the pass."""
        synchronize(pl_module.device)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        """Writes the records of the step that has just ended."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        times = Throughput.needed_by(self, trainer).times
        stream: StepStream = data.step_stream
        step = step_record(times, stream, self._update.lap(), self._now_s)
        self._now_s += step.seconds
        groups = [timeline.group_record(group) for group in stream.groups]
        passes = [pass_record(*one) for one in stream.passes]  # of rank 0
        with best_effort("The timeline", path := self.path(trainer)):
            timeline.write(path, [*self._generators.lap(), *passes, *groups, step], "a")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the measurements."""
        self._update.detach()
        self._generators.end()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Stops the measurements: Lightning does not call `on_train_end` after an error."""
        self.on_train_end(trainer, pl_module)

    @staticmethod
    def path(trainer: L.Trainer) -> Path:
        """Returns the path of a run's timeline."""
        return run_folder(trainer) / "timeline.jsonl"


def step_record(
    times: StepTimes, stream: StepStream, update_s: float, started_s: float
) -> StepRecord:
    """Returns the record of a step that has ended; `other_s` is the rest of its seconds."""
    packer = stream.packer
    tokens = [trainable_tokens(group, packer) for group in stream.groups]
    waits = list(zip(stream.waits, tokens, strict=True))
    first_s, more_s, last_s = timeline.split_waits(waits, packer.budget)
    parts = {"wait_first_s": first_s, "wait_more_s": more_s, "wait_last_s": last_s}
    parts |= {
        "wait_reward_s": times.trainer.get("wait_reward", 0.0),
        "update_s": update_s,
        "sync_s": times.sync,
    }
    parts["train_s"] = sum(seconds for seconds, _ in stream.passes)
    versions = Counter[int]()
    for group in stream.groups:
        for rollout in group.rollouts:
            versions.update(rollout.policy_versions)
    return StepRecord(
        step=stream.step,
        started_s=started_s,
        seconds=times.step,
        other_s=times.step - sum(parts.values()),
        pause_s=times.sync_pause,
        generation_s=timeline.generation_s(stream.groups),
        tokens=stream.num_tokens,
        attention_tokens=packer.attention_tokens,
        lags={
            stream.step - version: tokens
            for version, tokens in sorted(versions.items(), reverse=True)
        },
        **parts,
    )


def pass_record(seconds: float, lengths: Sequence[int]) -> MicroBatchRecord:
    """Returns the record of a forward and backward pass over sequences of these lengths."""
    squared = sum(length * length for length in lengths)
    return MicroBatchRecord(seconds=seconds, tokens=sum(lengths), tokens_squared=squared)


def trainable_tokens(group: Group, packer: Packer) -> int:
    """Returns the tokens of a group that may be trained, with its prompt as often as it is read."""
    prompt = len(group.prompt.token_ids)
    branches = [branch for rollout in group.scored for branch in rollout.branches]
    lengths = [prompt + len(branch.places) for branch in branches]
    return sum(
        tree_lengths(
            lengths,
            prompt - 1,
            longest=packer.micro_batch_tokens,
            attention_tokens=packer.attention_tokens,
        )
    )


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class UpdateTimer:
    """Seconds of the optimizer's updates, measured by its own hooks."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._began = self._seconds = 0.0

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to measure this optimizer."""
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def detach(self) -> None:
        """Stops measuring; idempotent."""
        while self._hooks:
            self._hooks.pop().remove()

    def lap(self) -> float:
        """Returns the seconds since the last lap."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _begin(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        self._began = time.monotonic()

    def _end(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        synchronize(optimizer.param_groups[0]["params"][0].device)
        self._seconds += time.monotonic() - self._began


class GeneratorSampler:
    """Samples the state of the generators that write rollouts, on the fleet's loop."""

    def __init__(self) -> None:
        self._records = deque[GeneratorRecord]()
        self._task: Future[None] | None = None

    def begin(self, fleet: Any) -> None:
        """Samples until `end`, or until the loop closes."""
        self._records.clear()
        self._task = fleet.loop.submit(self._sample(fleet.rollouts))

    def end(self) -> None:
        """Stops sampling; idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def lap(self) -> list[GeneratorRecord]:
        """Returns the intervals that ended since the last lap; raises an error of the sampling."""
        if self._task is not None and self._task.done():
            self._task.result()
        return [self._records.popleft() for _ in range(len(self._records))]

    async def _sample(self, pool: GeneratorPool) -> None:
        known: dict[Generator, WorkIntervals] = {}
        while True:
            now = asyncio.get_running_loop().time()
            known = {
                one: known.get(one) or WorkIntervals(self._records.append)
                for one in pool.generators
            }
            for generator, intervals in known.items():
                intervals.add(now, generator.stats.snapshot())
            await asyncio.sleep(SAMPLE_S)
