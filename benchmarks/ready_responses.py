"""Training alone: the steps of a timed run with responses that are there already, without waits and
syncs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch

import lrl
from benchmarks.random_policy import llama
from benchmarks.timed_run import (
    GROUPS,
    PROMPT_TOKENS,
    RESPONSES,
    OnCore,
    System,
    Timed,
    make_module,
    quiet_trainer,
)
from lrl.advantages import GroupMean
from lrl.planning.responses import LengthSampler
from lrl.rollouts.learners import Learners
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import GroupSource, StepLoader, StepStream
from lrl.system.stopwatch import Stopwatch
from lrl.training.model import open_tokenizer
from lrl.types import Group, Rollout


def train_alone(
    system: System,
    policy: Path,
    lengths: LengthSampler,
    steps: int,
    folder: Path,
    *also: L.Callback,
) -> list[Timed]:
    data = timed_steps(policy, lengths, system.micro_batch_tokens)
    torch.set_num_threads(system.trainer_threads)
    quiet_trainer(steps, folder, callbacks=[data.supervisor, *also]).fit(make_module(policy), data)
    return data.supervisor.times


def timed_steps(policy: Path, lengths: LengthSampler, micro_batch_tokens: int) -> ReadyResponses:
    prompts = lrl.Prompts("lrl.quickstart.task:problems", shuffle=False)
    prompts.load(open_tokenizer(str(policy)), PROMPT_TOKENS)
    return ReadyResponses(
        prompts,
        llama("5m").vocab_size,
        lengths,
        groups=GROUPS,
        responses=RESPONSES,
        micro_batch_tokens=micro_batch_tokens,
    )


class Ready(GroupSource):
    """Groups that are made as a step asks for them."""

    def __init__(self, groups: Iterator[Group]) -> None:
        self.groups = groups

    def next_group(self, step: int) -> Group:
        return next(self.groups)


class ReadyResponses(L.LightningDataModule):
    """Steps of made-up responses: real prompts, drawn lengths, random tokens, random rewards.

    Args:
        prompts: The prompts, loaded.
        vocabulary: Number of tokens to draw from.
        lengths: Of the responses.
        groups: Prompts of a step.
        responses: Responses to each.
        micro_batch_tokens: See `lrl.RolloutDataModule`.
        share_prefixes: See `lrl.RolloutDataModule`.
    """

    def __init__(
        self,
        prompts: lrl.Prompts,
        vocabulary: int,
        lengths: LengthSampler,
        *,
        groups: int,
        responses: int,
        micro_batch_tokens: int,
        share_prefixes: bool = True,
    ) -> None:
        super().__init__()
        self.prompts = prompts
        self.vocabulary = vocabulary
        self.lengths = lengths
        self.groups = groups
        self.responses = responses
        self.micro_batch_tokens = micro_batch_tokens
        self.share_prefixes = share_prefixes
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
            source=Ready(self._groups(trainer.global_step)),
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
            rollouts = [
                Rollout(
                    token_ids=[draw.randrange(self.vocabulary) for _ in range(tokens)],
                    logprobs=[-6.0] * tokens,
                    versions=[step] * tokens,
                    finish_reason="length",
                    reward=draw.random(),
                )
                for tokens in lengths
            ]
            yield Group(index=index, prompt=self.prompts[index], rollouts=rollouts)


class Laps(L.Callback):
    """Keeps each step's times from its stopwatch alone."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.times: list[Timed] = []
        self._core = OnCore()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        self.times.append(Timed(self.stopwatch.lap(), on_core=self._core.lap()))
