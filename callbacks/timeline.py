"""Writes a timeline of the run (`lrl.planning.profiling.timeline`), to which the simulator's costs are fitted."""

from __future__ import annotations

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

from lrl.callbacks.base import OnRankZero, find
from lrl.callbacks.throughput import StepTimes, Throughput
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.planning.profiling import timeline
from lrl.planning.profiling.intervals import SAMPLE_S, WorkIntervals
from lrl.planning.profiling.timeline import GeneratorRecord, MicroBatchRecord, Record, StepRecord
from lrl.rollouts.stream import StepStream
from lrl.runtime.best_effort import best_effort
from lrl.runtime.config_errors import ConfigError
from lrl.runtime.run_folder import run_folder
from lrl.types import Group

log = logging.getLogger(__name__)

FILE = "timeline.jsonl"


class Timeline(OnRankZero):
    """Writes `timeline.jsonl` into the run's folder. It takes the times of `Throughput`.

    A run that is resumed in the same folder writes on behind the steps that it goes on from, and takes out what was
    behind them. On a GPU the trainer waits for the end of every backward pass, so that its time is its own.

    Args:
        planned_step_s: Seconds a step that `lrl plan` has forecast: for `lrl plan --compare` alone.

    Raises:
        ValueError: There is no `Throughput`.
    """

    def __init__(self, planned_step_s: float | None = None) -> None:
        self.planned_step_s = planned_step_s
        self._update = Update()
        self._watch = Watch()
        self._now_s = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """What is missing is said before a server starts."""
        if find(trainer, Throughput) is None:
            raise ConfigError(
                "trainer.callbacks has lrl.callbacks.Timeline without lrl.callbacks.Throughput, whose times it writes. "
                "Add it."
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go on behind the steps that are done, and begin to look at the generators."""
        path = self.path(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        with best_effort("The timeline", path):
            known = timeline.truncate(path, trainer.global_step)
            self._now_s = known[-1].started_s + known[-1].seconds if known else 0.0
        self._update.attach(trainer.optimizers[0])
        self._watch.begin(trainer.datamodule.fleet)  # type: ignore[attr-defined]

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait for the pass, where it is not done yet."""
        finish(pl_module.device)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Write what belongs to the step that has just ended."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        throughput = find(trainer, Throughput)
        assert throughput is not None, "checked in setup"
        step = step_record(throughput.times, data.step_stream, self._update.lap(), self._now_s)
        self._now_s += step.seconds
        groups = [timeline.group_record(group) for group in data.step_stream.groups]
        with best_effort("The timeline", path := self.path(trainer)):
            timeline.write(path, [*self._watch.lap(), *pass_records(data.step_stream), *groups, step], "a")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look no more."""
        self._end()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Look no more: Lightning does not call `on_train_end` after an error."""
        self._end()

    def _end(self) -> None:
        self._update.detach()
        self._watch.end()

    @staticmethod
    def path(trainer: L.Trainer) -> Path:
        """Where a run writes it."""
        return run_folder(trainer) / FILE


def step_record(times: StepTimes, stream: StepStream, update_s: float, started_s: float) -> StepRecord:
    """The record of a step that has ended; what none of its fields names is in `other_s`."""
    waits = list(zip(stream.waits, map(trained_tokens, stream.groups), strict=True))
    first_s, more_s, last_s = timeline.split_waits(waits, stream.packer.budget)
    train_s = sum(seconds for seconds, _ in stream.passes)
    reward_s = times.trainer.get("wait_reward", 0.0)
    return StepRecord(
        step=stream.step,
        started_s=started_s,
        seconds=times.step,
        wait_first_s=first_s,
        wait_more_s=more_s,
        wait_last_s=last_s,
        wait_reward_s=reward_s,
        train_s=train_s,
        update_s=update_s,
        sync_s=times.sync,
        other_s=times.step - first_s - more_s - last_s - reward_s - train_s - update_s - times.sync,
        pause_s=times.sync_pause,
        generation_s=timeline.generation_s(stream.groups),
        tokens=stream.num_tokens,
        lags=lags(stream.groups, stream.step),
    )


def pass_records(stream: StepStream) -> list[Record]:
    """A record for each forward and backward pass of a step on rank 0."""
    return [
        MicroBatchRecord(seconds=seconds, tokens=sum(lengths), tokens_squared=sum(n * n for n in lengths))
        for seconds, lengths in stream.passes
    ]


def trained_tokens(group: Group) -> int:
    """Tokens of the group's responses that may be trained, prompts included."""
    return sum(len(group.prompt.token_ids) + len(rollout.token_ids) for rollout in group.scored)


def lags(groups: Sequence[Group], step: int) -> dict[int, int]:
    """lag -> answer tokens of that lag."""
    versions = Counter(version for group in groups for rollout in group.rollouts for version in rollout.versions)
    return {step - version: tokens for version, tokens in sorted(versions.items(), reverse=True)}


def finish(device: torch.device) -> None:
    """Wait until a GPU has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Update:
    """Seconds of the optimizer's updates, by its own hooks."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._began = self._seconds = 0.0

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on this optimizer's count."""
        self._hooks = [optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)]

    def detach(self) -> None:
        """No more; idempotent."""
        while self._hooks:
            self._hooks.pop().remove()

    def lap(self) -> float:
        """The seconds since the last lap."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _begin(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        self._began = time.monotonic()

    def _end(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        finish(optimizer.param_groups[0]["params"][0].device)
        self._seconds += time.monotonic() - self._began


class Watch:
    """Looks at the generators that write rollouts, on the fleet's loop."""

    def __init__(self) -> None:
        self._records = deque[GeneratorRecord]()
        self._looking: Future[None] | None = None

    def begin(self, fleet: Any) -> None:
        """Look until `end`, or until the loop closes."""
        self._records.clear()
        self._looking = fleet.loop.submit(self._look(fleet.rollouts))

    def end(self) -> None:
        """Look no more; idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def lap(self) -> list[GeneratorRecord]:
        """The stretches that ended since the last lap; raises what went wrong in looking."""
        if self._looking is not None and self._looking.done():
            self._looking.result()
        return [self._records.popleft() for _ in range(len(self._records))]

    async def _look(self, pool: GeneratorPool) -> None:
        known: dict[Generator, WorkIntervals] = {}
        while True:
            now = asyncio.get_running_loop().time()
            known = {one: known.get(one) or WorkIntervals(self._records.append) for one in pool.generators}
            for generator, intervals in known.items():
                intervals.add(now, generator.stats.snapshot())
            await asyncio.sleep(SAMPLE_S)
