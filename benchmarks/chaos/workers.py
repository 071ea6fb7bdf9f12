"""Rewards or environments that fail: the quickstart's task while one response, or one turn, in twenty
raises, crashes or kills its process, fills its memory, hangs, ...

    python -m benchmarks.chaos rewards                           run what is missing, then print
    python -m benchmarks.chaos environments --faults crash hang  only these

What is struck has to be left out, and everything else has to be trained. So the counts must equal
the injected faults, every prompt is trained once, and the accuracy is that of the run without
faults. Prompt and text decide what is struck; held-out problems are not. No share of failures ends a
run here. All runs use one vLLM server, one after another.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.chaos import faulty
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
from lrl.rewards.failure_stats import EPISODE_KINDS
from lrl.types import Prompt, Rollout

NONE = "none"
SETTINGS: dict[str, Any] = {
    "faults": ([], "only these"),
    "share": (0.05, "that fails"),
    "seed": (0, "of the run"),
    "workers": (2, "processes"),
    "timeout_s": (1.0, "of a call"),
    "memory_gib": (1.0, "of one"),
    **arguments.of_training(lr=1e-4, steps=20),
}
KINDS = {
    "rewards": {kind: kind for kind in faulty.OF_REWARDS},
    "environments": {fault: kind for fault, (kind, _) in faulty.OF_ENVIRONMENTS.items()},
}
"""By experiment: each fault, and the kind as which lrl has to count it."""
HEADS = ("fault", "injected", "counted", "other failures", "retried", "replaced")
HEADS += ("prompts trained; twice", "accuracy before, after", "seconds")


def runs(kinds: Iterable[str], args: argparse.Namespace) -> Iterator[Row]:
    how = arguments.chosen(args, "seed", "lr", "steps", "groups", "responses")
    how |= {"max_lag": 1, "schedule": "linear"}
    for fault in args.faults or [NONE, *kinds]:
        yield {"fault": fault, "share": 0.0 if fault == NONE else args.share, **how}


def settings_of(run: Row) -> RunSettings:
    return RunSettings(**{one.name: run[one.name] for one in fields(RunSettings)})


def measure(
    train: Callable[..., Row], args: argparse.Namespace, missing: list[Row]
) -> Iterator[Row]:
    with lent_server(policy_of(args.seed), server_settings(), args.folder) as server:
        for run in missing:
            kind = "" if run["fault"] == NONE else run["fault"]
            yield run | train(server, args, run, kind)


class Trained(EveryStep):
    """Counts how often each prompt was trained."""

    def __init__(self) -> None:
        self.prompts: Counter[int] = Counter()

    def step_done(self, trainer: Any) -> None:
        groups = trainer.datamodule.run.step_stream.groups
        self.prompts.update(group.prompt.id for group in groups)


class CountingPool(RewardPool):
    """A reward pool that also counts the responses that the fault is for."""

    def __init__(self, reward: faulty.FaultyReward, **limits: Any) -> None:
        super().__init__([reward], **limits)
        self.reward = reward
        self.struck = 0

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        await super().score(prompt, rollouts)
        self.struck += sum(self.reward.strikes(prompt.text, rollout.text) for rollout in rollouts)


def fit(server: LentServer, run: Row, data: lrl.RolloutDataModule, folder: Path) -> Row:
    """Makes one run; returns what both experiments record."""
    settings = settings_of(run)
    evaluation, trained = held_out(settings.steps), Trained()
    if data.environment is None:
        # Evaluations have a pool of their own: the fault is for the run alone.
        evaluation.rewards = [correct]
    trainer = make_trainer(server, settings, [evaluation, trained], folder)
    started = time.monotonic()
    trainer.fit(make_module(settings, lrl.objectives.AIPO(rho=4.0)), data)
    return {
        "prompts": len(trained.prompts),
        "twice": sum(times > 1 for times in trained.prompts.values()),
        "accuracy_before": round(evaluation.reports[0][1].accuracy, 4),
        "accuracy": round(evaluation.reports[-1][1].accuracy, 4),
        "seconds": round(time.monotonic() - started, 1),
    }


def train_rewards(server: LentServer, args: argparse.Namespace, run: Row, kind: str) -> Row:
    reward = faulty.FaultyReward(kind, args.share, args.seed)
    limits = arguments.chosen(args, "workers", "timeout_s", "memory_gib")
    data = make_data(settings_of(run))
    pool = data.reward_pool = CountingPool(reward, **limits, max_failures=1.0)
    found = fit(server, run, data, args.folder / run["fault"])
    counts = dict(pool.counts)
    found |= {"retried": counts.pop("retried"), "replaced": counts.pop("replaced")}
    return found | {"injected": pool.struck, "counts": counts}


def train_environments(server: LentServer, args: argparse.Namespace, run: Row, kind: str) -> Row:
    marks = args.folder / run["fault"] / "marks"
    shutil.rmtree(marks, ignore_errors=True)
    marks.mkdir(parents=True)
    data = make_data(
        settings_of(run),
        "benchmarks.chaos.faulty:problems",
        environment=faulty.FaultyCalculator(kind, args.share, str(marks)),
        environment_workers=args.workers,
        environment_memory_gib=args.memory_gib,
        turn_timeout_s=args.timeout_s,
        max_reward_failures=1.0,
    )
    assert data.environment is not None
    pool = data.environment.pool
    found = fit(server, run, data, marks.parent)
    counts = {kind: data.reward_pool.counts[kind] for kind in EPISODE_KINDS}
    found |= {"retried": sum(pool.counts.values()), "replaced": pool.replaced}
    return found | {"injected": len(list(marks.iterdir())), "counts": counts}


def table(made: Sequence[Row]) -> str:
    return records.markdown(HEADS, map(cells, made))


def cells(record: Row) -> list[object]:
    counts = record["counts"]
    rewards = counts.keys() >= KINDS["rewards"].keys()
    kinds = KINDS["rewards" if rewards else "environments"]
    kind = kinds.get(record["fault"], "")
    failures = {*kinds.values()} & counts.keys()
    return [
        record["fault"],
        record["injected"],
        f"{counts[kind]} {kind}" if kind else "",
        sum(counts[name] for name in failures if name != kind),
        record["retried"],
        record["replaced"],
        f"{record['prompts']}; {record['twice']}",
        f"{record['accuracy_before']:.3f}, {record['accuracy']:.3f}",
        f"{record['seconds']:.0f}",
    ]


EXPERIMENTS = {
    name: (SETTINGS, partial(runs, KINDS[name]), partial(measure, train))
    for name, train in (("rewards", train_rewards), ("environments", train_environments))
}
