"""Training alone: steps on responses that are there already, without waits and syncs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L

import lrl
from benchmarks.random_policy import random_group
from benchmarks.runs import EveryStep
from lrl.advantages import GroupMean
from lrl.callbacks.throughput import StepTimes
from lrl.datamodule import StepLoader
from lrl.planning.workload import Lognormal
from lrl.rollouts.learners import Learners
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import StepStream
from lrl.system.stopwatch import Stopwatch
from lrl.types import Group


class Ready:
    """Groups that are made as a step asks for them."""

    def __init__(self, groups: Iterator[Group]) -> None:
        self.groups = groups

    def next_group(self, step: int) -> Group:
        return next(self.groups)

    def give_up(self, group: Group) -> None:
        """Keeps no book."""

    def raise_if_stopped(self) -> None:
        """Nobody stops it."""


@dataclass(eq=False, repr=False)
class ReadyResponses(L.LightningDataModule):
    """Steps of made-up responses: real prompts, which are loaded, drawn lengths, random tokens,
    random rewards."""

    prompts: lrl.Prompts
    vocabulary: int
    lengths: Lognormal
    groups: int = field(kw_only=True)
    responses: int = field(kw_only=True)
    micro_batch_tokens: int = field(kw_only=True)
    share_prefixes: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__init__()
        self.stopwatch = Stopwatch()
        self.supervisor = Laps(self.stopwatch)

    def train_dataloader(self) -> StepLoader:
        return StepLoader(10**6, self._next_step)

    def _next_step(self) -> StepStream:
        trainer: Any = self.trainer
        policy: lrl.PolicyModule = trainer.lightning_module
        shares = self.share_prefixes and policy.responses_share.prefixes
        return StepStream(
            trainer.global_step,
            self.groups,
            source=Ready(self._groups(trainer.global_step)),  # type: ignore[arg-type]
            policy=policy,
            learners=Learners(GroupMean()),
            packer=Packer(
                self.micro_batch_tokens,
                GroupMean(),
                temperature=1.0,
                share_rows=policy.responses_share.rows,
                attention_tokens=policy.attention_tokens if shares else 0,
                masks=policy.responses_share.masks,
            ),
            stopwatch=self.stopwatch,
        )

    def _groups(self, step: int) -> Iterator[Group]:
        draw = random.Random(step)
        for index in range(step * self.groups, (step + 1) * self.groups):
            lengths = self.lengths.of(index % len(self.prompts), index, self.responses)
            yield random_group(
                draw,
                index,
                self.prompts[index],
                lengths=lengths,
                vocabulary=self.vocabulary,
                version=step,
            )


class Laps(EveryStep):
    """Keeps each step's times from its stopwatch alone."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.times: list[StepTimes] = []

    def step_done(self, trainer: Any) -> None:
        self.times.append(StepTimes(self.stopwatch.lap()))
