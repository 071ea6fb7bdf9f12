"""A short run whose time is all that counts: a policy of 5 million random weights, and answers of forced lengths.

What the benchmarks of time have in common: the policy and its prompts, a run on a lent server, the same training on
answers that are there already, and the seconds of every step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import lightning as L
import torch

import lrl
from benchmarks.forced_lengths import equal, forced, long_tailed
from benchmarks.lent_server import Borrowing, LentServer
from benchmarks.random_policy import hashed, llama, make_policy
from lrl.advantages import GroupMean
from lrl.callbacks import Throughput, WeightSync
from lrl.callbacks.throughput import StepTimes
from lrl.data import Group, Rollout
from lrl.network import open_tokenizer
from lrl.planning.answers import Lengths
from lrl.quickstart.task import problems
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import StepLoader, StepStream
from lrl.stopwatch import Stopwatch

LENGTHS: dict[str, Lengths] = {"equal": equal(), "long-tailed": long_tailed()}
"""Of answers: 64 tokens each; lognormal, mean 64, at most 512."""
GROUPS, ANSWERS = 8, 16
"""Prompts of a step, and answers to each: 128 a step."""
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 512
CAPACITY = 256
"""Answers that a server writes at once."""
LR = 1e-6
WARM_UP = 3
"""First steps of a run that do not count: the pipeline fills, and AdamW makes its state."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to divide the machine.

    Args:
        title: In tables.
        server_threads: CPU threads of the generator.
        trainer_threads: CPU threads of the trainer.
        max_lag: See `lrl.RolloutDataModule`.
        placement: See `lrl.strategy.GeneratorDevices`.
        trains: Whether the policy is trained and synced; otherwise answers are only taken.
    """

    title: str
    server_threads: int
    trainer_threads: int
    max_lag: int
    placement: Literal["split", "shared"] = "split"
    trains: bool = True


class OnlyTakes(lrl.PolicyModule):
    """A policy that takes a step's answers, packs them, and learns nothing from them."""

    def training_step(self, step: Any, batch_idx: int) -> None:
        """See `lrl.PolicyModule.training_step`."""
        for _ in step:
            pass
        optimizer: Any = self.optimizers()
        optimizer.step()  # without gradients; Lightning counts steps by these calls


class OnlyAtTheStart(WeightSync):
    """One sync before the first step. Afterwards only the permission to admit more prompts goes to the controller."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """See `WeightSync.on_train_batch_end`."""
        self.pause_seconds = 0.0
        trainer.datamodule.new_version(trainer.global_step)  # type: ignore[attr-defined]


class Steps(L.Callback):
    """Sets the trainer's threads and keeps each step's times. Put it last.

    Args:
        threads: Of the trainer; the strategy's own choice is overruled.
        throughput: What measures the steps.
    """

    def __init__(self, threads: int, throughput: Throughput) -> None:
        self.threads, self.throughput = threads, throughput
        self.times: list[StepTimes] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """By now the strategy has set them."""
        torch.set_num_threads(self.threads)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Note the step that has just ended."""
        self.times.append(self.throughput.times)


def policy_5m(folder: Path) -> Path:
    """The policy, made if it is not there."""
    path = folder / "policy-5m"
    make_policy(llama("5m"), [row["prompt"] for row in problems()], path, "cpu")
    return path


def make_module(policy: Path, kind: type[lrl.PolicyModule] = lrl.PolicyModule) -> lrl.PolicyModule:
    """The policy as a module, in float32."""
    return kind(str(policy), lr=LR, dtype="float32")


def server_settings(threads: int) -> lrl.ServerSettings:
    """Of a server with so many CPU threads."""
    return lrl.ServerSettings(
        max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS, max_num_seqs=CAPACITY, dtype="float32", threads=threads
    )


def run(
    system: System, server: LentServer, policy: Path, lengths: Lengths, counted: int, folder: Path
) -> list[StepTimes]:
    """The times of so many steps of one run, those behind the warm-up."""
    throughput = Throughput()
    kept = Steps(system.trainer_threads, throughput)
    trainer = quiet_trainer(
        WARM_UP + counted + system.max_lag + 1,  # for the last ones nothing more is written
        folder,
        strategy=Borrowing(server, CAPACITY, placement=system.placement),
        devices=2,
        callbacks=[WeightSync() if system.trains else OnlyAtTheStart(), throughput, kept],
    )
    data = lrl.RolloutDataModule(
        prompts=lrl.Prompts("lrl.quickstart.task:problems", shuffle=False),
        rewards=[hashed],
        groups_per_step=GROUPS,
        rollouts_per_group=ANSWERS,
        max_lag=system.max_lag,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
    )
    with forced(lengths, prompts=len(problems())):
        trainer.fit(make_module(policy, lrl.PolicyModule if system.trains else OnlyTakes), data)
    return kept.times[WARM_UP:][:counted]


def train_alone(policy: Path, threads: int, lengths: Lengths, counted: int, folder: Path) -> list[StepTimes]:
    """The times of the same steps when all of their answers are there at once: no server, no wait and no sync."""
    data = ReadyAnswers(policy, lengths)
    torch.set_num_threads(threads)
    quiet_trainer(WARM_UP + counted, folder, callbacks=[data.keeper]).fit(make_module(policy), data)
    return data.keeper.times[WARM_UP:]


def quiet_trainer(steps: int, folder: Path, **more: Any) -> L.Trainer:
    """A trainer on the CPU that writes nothing."""
    return L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **more,
    )


class ReadyAnswers(L.LightningDataModule):
    """Steps of made-up answers: prompts and lengths of the runs, random tokens, random rewards.

    Args:
        policy: Whose tokenizer is used.
        lengths: Of the answers.
    """

    def __init__(self, policy: Path, lengths: Lengths) -> None:
        super().__init__()
        self.lengths = lengths
        self.stopwatch = Stopwatch()
        self.keeper = Laps(self.stopwatch)
        self.prompts = lrl.Prompts("lrl.quickstart.task:problems", shuffle=False)
        self.prompts.load(open_tokenizer(str(policy)), PROMPT_TOKENS)
        self.vocabulary = llama("5m").vocab_size

    def train_dataloader(self) -> StepLoader:
        """More steps than any run has."""
        return StepLoader(10**6, self._next_step)

    def _next_step(self) -> StepStream:
        step = self.trainer.global_step  # type: ignore[union-attr]
        arriving = self._groups(step)
        return StepStream(
            next_group=lambda: next(arriving),
            groups=GROUPS,
            packer=Packer(8192, GroupMean(), temperature=1.0),
            step=step,
            give_up=lambda group: None,
            prepare=lambda group: None,
            end=lambda groups: None,
            stopwatch=self.stopwatch,
            gather=False,
        )

    def _groups(self, step: int) -> Iterator[Group]:
        draw = random.Random(step)
        for index in range(step * GROUPS, (step + 1) * GROUPS):
            lengths = self.lengths.of(index % len(self.prompts), index, ANSWERS)
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
        self.times: list[StepTimes] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Note the step that has just ended."""
        self.times.append(StepTimes(self.stopwatch.lap()))


def means(times: Sequence[StepTimes]) -> dict[str, float]:
    """Mean seconds a step: all of it, and its parts. With a median every other step could wait and nobody would see."""
    parts = ("step", "wait", "train", "sync", "sync_pause")
    return {part: fmean(getattr(one, part) for one in times) for part in parts}
