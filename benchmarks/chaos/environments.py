"""Environments that fail: the recipe `calculator` while one turn in twenty raises, crashes or
kills its process, fills its memory, hangs, or is never answered.

    python -m benchmarks.chaos environments                      run what is missing, then print
    python -m benchmarks.chaos environments --faults crash hang  only these

A struck episode has to be left out, and the other episodes of its process have to go on. So the
counts must equal the injected faults, every prompt is trained once, and the accuracy is that of the
run without faults. Prompt and text of a turn decide whether it is struck. Held-out problems are
not struck. No share of failures ends a run here. All runs use one vLLM server, one after another;
a measurement that is in the results already is not repeated.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import lightning as L

import lrl
from benchmarks import arguments, records
from benchmarks.chaos.faulty_calculator import KINDS, FaultyCalculator
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
from lrl.rewards.failure_stats import EPISODE_KINDS

HEAD = (
    "| fault | turns struck | counted | other failures | processes replaced | episodes played "
    "again | prompts trained; twice | accuracy before, after | seconds |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
NONE = "none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [NONE, *KINDS]
    parser.add_argument("--faults", nargs="+", choices=names, default=names)
    parser.add_argument("--share", type=float, default=0.05, help="of the turns (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument(
        "--timeout-s", type=float, default=1.0, help="for the reply to a turn (%(default)s)"
    )
    parser.add_argument("--memory-gib", type=float, default=1.0, help="of a process (%(default)s)")
    arguments.add_training(parser, lr=1e-4, steps=20)


def run(args: argparse.Namespace) -> int:
    found = records.read(args.out)
    missing = [
        fault for fault in args.faults if records.find(found, described(args, fault)) is None
    ]
    if missing:
        with lent_server(policy_of(args.seed), server_settings(), args.folder) as server:
            for fault in missing:
                record = measure(server, args, fault)
                records.append(args.out, record | {"command": args.command})
    found = records.read(args.out)
    rows = [records.find(found, described(args, fault)) for fault in args.faults]
    print("\n".join([HEAD, *(row(record) for record in rows if record is not None)]))
    return 0


def settings_of(args: argparse.Namespace) -> RunSettings:
    return RunSettings(
        seed=args.seed,
        max_lag=1,
        lr=args.lr,
        schedule="linear",
        steps=args.steps,
        groups=args.groups,
        responses=args.responses,
    )


def described(args: argparse.Namespace, fault: str) -> dict[str, Any]:
    share = 0.0 if fault == NONE else args.share
    return {"fault": fault, "share": share, **asdict(settings_of(args))}


class Trained(L.Callback):
    """Counts how often each prompt was trained."""

    def __init__(self) -> None:
        self.prompts: Counter[int] = Counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self.prompts.update(group.prompt.id for group in data.step_stream.groups)


def measure(server: LentServer, args: argparse.Namespace, fault: str) -> dict[str, Any]:
    settings = settings_of(args)
    folder = args.folder / fault
    marks = folder / "marks"
    shutil.rmtree(marks, ignore_errors=True)
    marks.mkdir(parents=True)
    evaluation = held_out(args.steps)
    trained = Trained()
    trainer = make_trainer(server, settings, [evaluation, trained], folder)
    policy = make_module(settings, lrl.objectives.AIPO(rho=4.0))
    data = make_data(
        settings,
        "benchmarks.chaos.faulty_calculator:problems",
        environment=FaultyCalculator("" if fault == NONE else fault, args.share, str(marks)),
        environment_workers=args.workers,
        environment_memory_gib=args.memory_gib,
        turn_timeout_s=args.timeout_s,
        max_reward_failures=1.0,
    )
    assert data.environment is not None
    pool = data.environment.pool
    started = time.monotonic()
    trainer.fit(policy, data)
    counts = data.reward_pool.counts
    return {
        **described(args, fault),
        "struck": len(list(marks.iterdir())),
        "counts": {kind: counts[kind] for kind in EPISODE_KINDS},
        "scored": counts["scored"],
        "replaced": pool.replaced,
        "played_again": dict(pool.counts),
        "prompts": len(trained.prompts),
        "twice": sum(times > 1 for times in trained.prompts.values()),
        "accuracy_before": round(evaluation.reports[0][1].accuracy, 4),
        "accuracy": round(evaluation.reports[-1][1].accuracy, 4),
        "seconds": round(time.monotonic() - started, 1),
    }


def row(record: dict[str, Any]) -> str:
    counts = record["counts"]
    kind = KINDS.get(record["fault"], "")
    others = sum(count for name, count in counts.items() if name != kind)
    cells = [
        record["fault"],
        record["struck"],
        f"{counts.get(kind, 0)} {kind}" if kind else "",
        others,
        record["replaced"],
        sum(record["played_again"].values()),
        f"{record['prompts']}; {record['twice']}",
        f"{record['accuracy_before']:.3f}, {record['accuracy']:.3f}",
        f"{record['seconds']:.0f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"
