"""Rewards or environments that fail: the quickstart's task while one response, or one turn, in twenty
raises, crashes or kills its process, fills its memory, hangs, ...

    python -m benchmarks.chaos rewards                           run what is missing, then print
    python -m benchmarks.chaos environments --faults crash hang  only these

What is struck has to be left out, and everything else has to be trained. So the counts must equal
the injected faults, every prompt is trained once, and the accuracy is that of the run without
faults. Prompt and text decide what is struck; held-out problems are not. No share of failures ends a
run here. A reward is struck in two runs: at every try, and at the first one only, so that the second
saves the response. All runs use one vLLM server, one after another; a measurement that is in the
results already is not repeated.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L

import lrl
from benchmarks import arguments, records
from benchmarks.chaos import faulty_calculator, faulty_reward
from benchmarks.lent_server import LentServer, lent_server
from benchmarks.quickstart_run import (
    RunSettings,
    held_out,
    make_data,
    make_module,
    make_trainer,
    policy_of,
    server_settings,
)
from lrl.quickstart.task import correct
from lrl.rewards import RewardPool
from lrl.rewards.failure_stats import EPISODE_KINDS
from lrl.types import Prompt, Rollout

NONE = "none"
KINDS = {
    "rewards": {kind: kind for kind in faulty_reward.FAULTS},
    "environments": faulty_calculator.KINDS,
}
"""By experiment: each fault, and the kind as which lrl has to count it."""
HEADS = ("fault", "strikes", "injected", "counted", "other failures", "retried", "replaced")
HEADS += ("prompts trained; twice", "accuracy before, after", "seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", nargs="+", help="(all)")
    parser.add_argument("--share", type=float, default=0.05, help="that fails (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--timeout-s", type=float, default=1.0, help="of a call (%(default)s)")
    parser.add_argument("--memory-gib", type=float, default=1.0, help="of one (%(default)s)")
    arguments.add_training(parser, lr=1e-4, steps=20)


def run(args: argparse.Namespace) -> int:
    """Runs what is missing, then prints the table."""
    faults = args.faults or [NONE, *KINDS[args.experiment]]
    twice = args.experiment == "rewards"
    runs = [
        (fault, once)
        for fault in faults
        for once in ((False, True) if twice and fault != NONE else (False,))
    ]
    wanted = [described(args, *one) for one in runs]
    found = records.read(args.out)
    missing = [one for one in runs if records.find(found, described(args, *one)) is None]
    if missing:
        measure = measure_rewards if twice else measure_environments
        with lent_server(policy_of(args.seed), server_settings(), args.folder) as server:
            for one in missing:
                record = described(args, *one) | measure(server, args, *one)
                records.append(args.out, record | {"command": args.command})
    rows = [row(args, record) for record in records.all_found(args.out, wanted)]
    print(records.markdown(HEADS, rows))
    return 0


def settings_of(args: argparse.Namespace) -> RunSettings:
    names = ("seed", "lr", "steps", "groups", "responses")
    how = {name: getattr(args, name) for name in names}
    return RunSettings(max_lag=1, schedule="linear", **how)


def described(args: argparse.Namespace, fault: str, once: bool) -> dict[str, Any]:
    share = 0.0 if fault == NONE else args.share
    return {"fault": fault, "first_try_only": once, "share": share, **asdict(settings_of(args))}


class Trained(L.Callback):
    """Counts how often each prompt was trained."""

    def __init__(self) -> None:
        self.prompts: Counter[int] = Counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self.prompts.update(group.prompt.id for group in data.run.step_stream.groups)


class CountingPool(RewardPool):
    """A reward pool that also counts the responses that the fault is for."""

    def __init__(self, reward: faulty_reward.Faulty, **limits: Any) -> None:
        super().__init__([reward], **limits)
        self.reward = reward
        self.struck = 0

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        await super().score(prompt, rollouts)
        self.struck += sum(self.reward.strikes(prompt.text, rollout.text) for rollout in rollouts)


def fit(
    server: LentServer, args: argparse.Namespace, data: lrl.RolloutDataModule, folder: Path
) -> dict[str, Any]:
    """Makes one run; returns what both experiments record."""
    settings = settings_of(args)
    evaluation, trained = held_out(args.steps), Trained()
    if args.experiment == "rewards":
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


def marks_of(folder: Path) -> Path:
    """Returns an empty folder that gets a file for each strike."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def measure_rewards(
    server: LentServer, args: argparse.Namespace, fault: str, once: bool
) -> dict[str, Any]:
    folder = args.folder / f"{fault}{'-once' * once}"
    marks = marks_of(folder / "marks")
    kind = "" if fault == NONE else fault
    reward = faulty_reward.Faulty(kind, args.share, args.seed, str(marks) if once else "")
    limits = {"workers": args.workers, "timeout_s": args.timeout_s, "memory_gib": args.memory_gib}
    data = make_data(settings_of(args))
    pool = data.reward_pool = CountingPool(reward, **limits, max_failures=1.0)
    found = fit(server, args, data, folder)
    counts = dict(pool.counts)
    found |= {"retried": counts.pop("retried"), "replaced": counts.pop("replaced")}
    injected = len(list(marks.iterdir())) if once else pool.struck
    return found | {"injected": injected, "counts": counts}


def measure_environments(
    server: LentServer, args: argparse.Namespace, fault: str, once: bool
) -> dict[str, Any]:
    folder = args.folder / fault
    marks = marks_of(folder / "marks")
    calculator = faulty_calculator.FaultyCalculator(
        "" if fault == NONE else fault, args.share, str(marks)
    )
    data = make_data(
        settings_of(args),
        "benchmarks.chaos.faulty_calculator:problems",
        environment=calculator,
        environment_workers=args.workers,
        environment_memory_gib=args.memory_gib,
        turn_timeout_s=args.timeout_s,
        max_reward_failures=1.0,
    )
    assert data.environment is not None
    pool = data.environment.pool
    found = fit(server, args, data, folder)
    counts = {kind: data.reward_pool.counts[kind] for kind in EPISODE_KINDS}
    found |= {"retried": sum(pool.counts.values()), "replaced": pool.replaced}
    return found | {"injected": len(list(marks.iterdir())), "counts": counts}


def row(args: argparse.Namespace, record: dict[str, Any]) -> list[object]:
    counts, kinds = record["counts"], KINDS[args.experiment]
    kind = kinds.get(record["fault"], "")
    failures = {*kinds.values()} & counts.keys()
    return [
        record["fault"],
        "first try" if record["first_try_only"] else "every try",
        record["injected"],
        f"{counts[kind]} {kind}" if kind else "",
        sum(counts[name] for name in failures if name != kind),
        record["retried"],
        record["replaced"],
        f"{record['prompts']}; {record['twice']}",
        f"{record['accuracy_before']:.3f}, {record['accuracy']:.3f}",
        f"{record['seconds']:.0f}",
    ]
