"""Rewards that fail: the quickstart's task while one response in twenty raises, crashes its worker,
never ends, ...

    python -m benchmarks.chaos rewards                      run what is missing, then print
    python -m benchmarks.chaos rewards --kinds crash nan    only these

For each kind of fault two runs: in one the fault strikes at every try, so that the response has to
be left out; in the other at the first try only, so that the second try saves it. The counts must
equal the injected faults, and the accuracy that of the run without faults. The text of a response
decides whether it is struck, so equal responses of a group are struck together; no share of
failures ends a run here. All runs use one vLLM server, one after another; a measurement that is in
the results already is not repeated.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lrl
from benchmarks import arguments, records
from benchmarks.chaos.faulty_reward import FAULTS, Faulty
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
from lrl.rewards import RewardPool
from lrl.types import Prompt, Rollout

HEAD = (
    "| fault | strikes | injected | counted | retried | other kinds | workers replaced | accuracy "
    "| seconds |\n|---|---|---|---|---|---|---|---|---|"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=["none", *FAULTS], default=["none", *FAULTS])
    parser.add_argument(
        "--share", type=float, default=0.05, help="of the responses that fail (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="reward workers (%(default)s)")
    parser.add_argument(
        "--timeout-s", type=float, default=1.0, help="for a response's reward (%(default)s)"
    )
    parser.add_argument(
        "--memory-gib", type=float, default=1.0, help="of a reward worker (%(default)s)"
    )
    arguments.add_training(parser, lr=1e-4, steps=60)


def run(args: argparse.Namespace) -> int:
    runs = [("", False)] * ("none" in args.kinds) + [
        (kind, once) for kind in args.kinds if kind != "none" for once in (False, True)
    ]
    found = records.read(args.out)
    missing = [run for run in runs if records.find(found, described(args, *run)[1]) is None]
    if missing:
        with lent_server(policy_of(args.seed), server_settings(), args.folder) as server:
            for run in missing:
                records.append(args.out, measure(server, args, *run) | {"command": args.command})
    found = records.read(args.out)
    rows = [
        record
        for run in runs
        if (record := records.find(found, described(args, *run)[1])) is not None
    ]
    print("\n".join([HEAD, *map(row, rows)]))
    return 0


class CountingPool(RewardPool):
    """A reward pool that also counts the responses that the fault is for."""

    def __init__(self, reward: Faulty, **limits: Any) -> None:
        super().__init__([reward], **limits)
        self.reward = reward
        self.struck = 0

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        await super().score(prompt, rollouts)
        self.struck += sum(self.reward.strikes(prompt.text, rollout.text) for rollout in rollouts)


def described(
    args: argparse.Namespace, kind: str, once: bool
) -> tuple[RunSettings, dict[str, Any]]:
    settings = RunSettings(
        seed=args.seed, max_lag=1, lr=args.lr, schedule=(
            "linear"
        ), steps=args.steps, groups=args.groups,
        responses=args.responses,
    )  # fmt: skip
    share = args.share if kind else 0.0
    return settings, {"fault": kind, "first_try_only": once, "share": share, **asdict(settings)}


def measure(server: LentServer, args: argparse.Namespace, kind: str, once: bool) -> dict[str, Any]:
    settings, description = described(args, kind, once)
    evaluation = held_out(args.steps)
    folder = args.folder / f"{kind or 'none'}{'-once' * once}"
    trainer = make_trainer(server, settings, [evaluation], folder)
    policy = make_module(settings, lrl.objectives.AIPO())
    data = make_data(settings)
    # Evaluations have a pool of their own, with counts of its own: the fault is for the run alone.
    evaluation.rewards = data.reward_pool.rewards
    with tempfile.TemporaryDirectory() as marks:
        reward = Faulty(kind, description["share"], args.seed, marks if once else "")
        limits = {
            "workers": args.workers,
            "timeout_s": args.timeout_s,
            "memory_gib": args.memory_gib,
        }
        pool = data.reward_pool = CountingPool(reward, **limits, max_failures=1.0)
        started = time.monotonic()
        trainer.fit(policy, data)
        injected = len(list(Path(marks).iterdir())) if once else pool.struck
    return {
        **description,
        "injected": injected,
        "counts": pool.counts,
        "accuracy": round(evaluation.reports[-1][1].accuracy, 4),
        "accuracy_before": round(evaluation.reports[0][1].accuracy, 4),
        "seconds": round(time.monotonic() - started, 1),
    }


def row(record: dict[str, Any]) -> str:
    counts, kind = record["counts"], record["fault"]
    others = sum(counts[name] for name in FAULTS if name != kind)
    strikes = "first try" if record["first_try_only"] else "every try"
    cells = [
        kind or "none",
        strikes if kind else "",
        record["injected"],
        counts.get(kind, 0),
        counts["retried"],
    ]
    cells += [others, counts["replaced"], f"{record['accuracy']:.3f}", f"{record['seconds']:.0f}"]
    return f"| {' | '.join(map(str, cells))} |"
