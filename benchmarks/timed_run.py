"""A short run for timing: a policy of 5 million random weights, and responses of forced lengths."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import lightning as L
import torch

import lrl
from benchmarks.forced_lengths import equal, forced, long_tailed
from benchmarks.random_policy import hashed, llama, make_policy
from benchmarks.runs import Borrowing, EveryStep, LentServer, OnlyTakes, lent_server, quiet_trainer
from lrl.callbacks import Throughput, WeightSync
from lrl.callbacks.base import run_of
from lrl.callbacks.throughput import StepTimes
from lrl.planning.workload import Lognormal
from lrl.quickstart.task import problems
from lrl.training.model import Dtype

CORES = len(os.sched_getaffinity(0))
LENGTHS: dict[str, Lognormal] = {"equal": equal(), "long-tailed": long_tailed()}
"""Of responses: 64 tokens each; lognormal, mean 64, at most 512."""
GROUPS, RESPONSES = 8, 16
"""Prompts of a step, and responses to each: 128 a step."""
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 512
TASK = "lrl.quickstart.task:problems"
MICRO_BATCH_TOKENS = 1024
"""Of this policy; its layers' output of so many tokens is little beyond a core's own cache."""
CAPACITY = 256
"""Responses that a server writes at once."""
LR = 1e-6
WARM_UP = 3
"""First steps of a run that do not count, by default: the pipeline fills, and AdamW makes its
state."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to divide the machine; see `lrl.RolloutDataModule` and the strategy."""

    title: str
    server_threads: int
    trainer_threads: int
    max_lag: int
    placement: Literal["split", "shared"] = "split"
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    trains: bool = True
    """Whether the policy is trained and synced; otherwise responses are only taken."""
    dtype: Dtype = "float32"
    """Of the generator; training is in float32."""


class OnlyAtTheStart(WeightSync):
    """Syncs once, before the first step. Later only the permission to admit more prompts goes to
    the controller."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        run = run_of(trainer)
        run.pause_seconds = 0.0
        run.calls.new_version(trainer.global_step)


class Steps(EveryStep):
    """Sets the trainer's threads, over the strategy's own choice, and keeps each step's times; put
    it behind `Throughput`."""

    def __init__(self, throughput: Throughput, threads: int) -> None:
        self.throughput = throughput
        self.threads = threads
        self.times: list[StepTimes] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.set_num_threads(self.threads)

    def step_done(self, trainer: Any) -> None:
        self.times.append(self.throughput.times)


def policy_5m(folder: Path) -> Path:
    path = folder / "policy-5m"
    make_policy(llama("5m"), [row["prompt"] for row in problems()], path, "cpu")
    return path


@contextmanager
def servers_for(
    systems: Sequence[System], policy: Path, folder: Path, prompt_tokens: int = PROMPT_TOKENS
) -> Iterator[dict[System, LentServer]]:
    if "OMP_NUM_THREADS" in os.environ:
        raise SystemExit("OMP_NUM_THREADS would overrule each side's threads: unset it.")
    lent: dict[tuple[int, Dtype], LentServer] = {}
    with ExitStack() as stack:
        for threads, dtype in dict.fromkeys((one.server_threads, one.dtype) for one in systems):
            settings = lrl.ServerSettings(
                max_model_len=prompt_tokens + RESPONSE_TOKENS,
                max_num_seqs=CAPACITY,
                dtype=dtype,
                threads=threads,
            )
            own = folder / f"{threads}-threads-{dtype}"
            lent[threads, dtype] = stack.enter_context(lent_server(policy, settings, own))
        yield {system: lent[system.server_threads, system.dtype] for system in systems}


def run(
    system: System,
    server: LentServer,
    policy: Path,
    lengths: Lognormal,
    counted: int,
    folder: Path,
    warm_up: int = WARM_UP,
    prompts: str = TASK,
    prompt_tokens: int = PROMPT_TOKENS,
) -> dict[str, float]:
    """Returns the `means` of the steps that count."""
    throughput = Throughput()
    kept = Steps(throughput, system.trainer_threads)
    trainer = quiet_trainer(
        warm_up + counted + system.max_lag + 1,  # for the last ones nothing more is written
        folder,
        strategy=Borrowing(server, CAPACITY, placement=system.placement),
        devices=2,
        callbacks=[WeightSync() if system.trains else OnlyAtTheStart(), throughput, kept],
    )
    data = lrl.RolloutDataModule(
        prompts=lrl.Prompts(prompts, shuffle=False),
        rewards=[hashed],
        groups_per_step=GROUPS,
        rollouts_per_group=RESPONSES,
        max_lag=system.max_lag,
        max_prompt_tokens=prompt_tokens,
        max_response_tokens=RESPONSE_TOKENS,
        micro_batch_tokens=system.micro_batch_tokens,
    )
    with forced(lengths, prompts=len(problems())):
        kind = lrl.PolicyModule if system.trains else OnlyTakes
        trainer.fit(kind(str(policy), lr=LR, dtype="float32"), data)
    times = kept.times[warm_up:][:counted]
    if len(times) < counted:
        raise RuntimeError(
            f"The run was ended after {len(kept.times)} steps, so it is not counted. Run it again."
        )
    return means(times)


def means(times: Sequence[StepTimes]) -> dict[str, float]:
    """Returns mean seconds a step and of its parts. A median would hide waits of every other
    step."""
    parts = ("step", "wait", "train", "sync", "sync_pause")
    return {part: fmean(getattr(one, part) for one in times) for part in parts}
