"""Rewards that fail: the quickstart's task while one response in twenty raises, crashes its worker,
hangs, ...

What is struck has to be left out, and everything else has to be trained. So the counts must equal
the injected faults, every prompt is trained once, and the accuracy is that of the run without
faults. Prompt and text decide what is struck; held-out problems are not. No share of failures ends
a run here.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.chaos.faulty import FAULTS, FaultyReward
from benchmarks.quickstart_run import (
    RunSettings,
    held_out,
    make_data,
    make_module,
    make_trainer,
    policy_of,
    server_settings,
)
from benchmarks.runs import EveryStep, LentServer, lent_server
from lrl.quickstart.task import correct
from lrl.rewards import RewardPool
from lrl.rewards.base import as_list
from lrl.types import Prompt, Rollout

NONE = "none"
SETTINGS: dict[str, Any] = {
    "faults": ([NONE, *FAULTS], "in turn", [NONE, *FAULTS]),
    "share": (0.05, "that fails"),
    "seed": (0, "of the run"),
    "timeout_s": (1.0, "of a call"),
    **arguments.of_training(lr=1e-4, steps=20),
}
HEADS = (
    *("fault", "injected", "counted", "other failures", "retried", "replaced"),
    *("prompts trained; twice", "accuracy before, after", "seconds"),
)


def runs(args: argparse.Namespace) -> Iterator[Row]:
    how = arguments.chosen(args, "seed", "lr", "steps", "groups", "responses")
    how |= {"max_lag": 1, "schedule": "linear", "first_try_only": False}
    for fault in args.faults:
        yield {"fault": fault, "share": 0.0 if fault == NONE else args.share, **how}


class Trained(EveryStep):
    """Counts how often each prompt was trained."""

    def __init__(self) -> None:
        self.prompts: Counter[int] = Counter()

    def step_done(self, trainer: Any) -> None:
        groups = trainer.datamodule.run.step_stream.groups
        self.prompts.update(group.prompt.id for group in groups)


class CountingPool(RewardPool):
    """A reward pool that also counts the responses that the fault is for."""

    def __init__(self, reward: FaultyReward, **limits: Any) -> None:
        super().__init__([reward], **limits)
        self.reward = reward
        self.struck = 0

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        await super().score(prompt, rollouts)
        self.struck += sum(self.reward.strikes(prompt.text, rollout.text) for rollout in rollouts)


def train(server: LentServer, args: argparse.Namespace, run: Row) -> Row:
    settings = RunSettings.of(run)
    reward = FaultyReward("" if run["fault"] == NONE else run["fault"], args.share, args.seed)
    data = make_data(settings)
    pool = data.reward_pool = CountingPool(
        reward, workers=2, timeout_s=args.timeout_s, memory_gib=1.0, max_failures=1.0
    )
    evaluation, trained = held_out(settings.steps), Trained()
    evaluation.rewards = as_list(correct)  # in a pool of its own: the fault is for the run alone
    folder = args.folder / run["fault"]
    started = time.monotonic()
    trainer = make_trainer(server, settings, [evaluation, trained], folder)
    trainer.fit(make_module(settings, lrl.objectives.AIPO(rho=4.0)), data)
    counts = dict(pool.counts)
    return {
        "prompts": len(trained.prompts),
        "twice": sum(times > 1 for times in trained.prompts.values()),
        "accuracy_before": round(evaluation.reports[0][1].reward, 4),
        "accuracy": round(evaluation.reports[-1][1].reward, 4),
        "seconds": round(time.monotonic() - started, 1),
        "retried": counts.pop("retried"),
        "replaced": counts.pop("replaced"),
        "injected": pool.struck,
        "counts": counts,
    }


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    with lent_server(policy_of(args.seed), server_settings(), args.folder) as server:
        for run in missing:
            yield run | train(server, args, run)


def table(made: Sequence[Row]) -> str:
    return records.markdown(HEADS, map(cells, made))


def cells(record: Row) -> list[object]:
    counts, fault = record["counts"], record["fault"]
    return [
        fault,
        record["injected"],
        counts.get(fault, ""),
        sum(counts[name] for name in FAULTS if name != fault),
        record["retried"],
        record["replaced"],
        f"{record['prompts']}; {record['twice']}",
        f"{record['accuracy_before']:.3f}, {record['accuracy']:.3f}",
        f"{record['seconds']:.0f}",
    ]


EXPERIMENTS = {"rewards": (SETTINGS, runs, measure)}
