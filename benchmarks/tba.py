"""TBA with its replay buffer, far off-policy: fresh responses of the quickstart's task eight
versions old, others older.

    python -m benchmarks.tba                 run what is missing, then print
    python -m benchmarks.tba --seeds 0 1     only these

All runs use one vLLM server, as in `benchmarks/lag_sweep.py`; finished ones are not repeated.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import lrl
from benchmarks import arguments, records
from benchmarks.lag_sweep import History
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

HEAD = "| seed | before | after | mean lag | largest lag | seconds |\n|---|---|---|---|---|---|"


def described(args: argparse.Namespace, seed: int) -> tuple[RunSettings, dict[str, Any]]:
    """Returns a run's settings, and the fields by which its record is found."""
    settings = RunSettings(
        seed=seed,
        max_lag=args.max_lag,
        lr=args.lr,
        schedule="linear",
        steps=args.steps,
        groups=args.groups,
        responses=args.responses,
    )
    replay = {"groups_per_step": args.replayed, "max_lag": args.replay_max_lag}
    return settings, {"objective": "TBA", "beta": args.beta, "replay": replay, **asdict(settings)}


def measure(server: LentServer, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Makes one run, from its start to its record."""
    settings, description = described(args, seed)
    history, evaluation = History(), held_out(args.evaluate_every)
    trainer = make_trainer(server, settings, [evaluation, history], args.folder / f"seed{seed}")
    policy = make_module(settings, lrl.objectives.TBA(args.beta), reference=lrl.Reference())
    data = make_data(settings, replay=lrl.Replay(**description["replay"], seed=seed))
    started = time.monotonic()
    trainer.fit(policy, data)
    return {
        **description,
        "seconds": round(time.monotonic() - started, 1),
        "evaluations": [
            {"step": step, "accuracy": round(report.accuracy, 4)}
            for step, report in evaluation.reports
        ],
        "series": history.series(),
    }


def row(record: dict[str, Any]) -> str:
    """Returns a run as a line of the table."""
    first = record["evaluations"][0]["accuracy"]
    last = record["evaluations"][-1]["accuracy"]
    lags = [lag for lag in record["series"]["lag_mean"] if lag is not None]
    largest = max(lag for lag in record["series"]["lag_max"] if lag is not None)
    mean = sum(lags) / len(lags)
    return (
        f"| {record['seed']} | {first:.3f} | {last:.3f} | {mean:.1f} | {largest:.0f} | "
        f"{record['seconds']:.0f} |"
    )


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tba", description="TBA with its replay buffer."
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--max-lag", type=int, default=8, help="of fresh responses (%(default)s)")
    parser.add_argument(
        "--replayed", type=int, default=8, help="groups trained again at each step (%(default)s)"
    )
    parser.add_argument(
        "--replay-max-lag", type=int, default=16, help="of replayed responses (%(default)s)"
    )
    parser.add_argument("--beta", type=float, default=0.1, help="(%(default)s)")
    arguments.add_training(parser, lr=1e-4, steps=60)
    parser.add_argument(
        "--evaluate-every", type=int, default=10, help="steps between evaluations (%(default)s)"
    )
    arguments.add_places(parser, "tba", plot=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, then prints the table."""
    args = arguments.parse(make_parser(), argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    found = records.read(args.out)
    missing = [seed for seed in args.seeds if records.find(found, described(args, seed)[1]) is None]
    if missing:
        with lent_server(policy_of(missing[0]), server_settings(), args.folder) as server:
            for seed in missing:
                records.append(args.out, measure(server, args, seed) | {"command": args.command})
    found = records.read(args.out)
    rows = [
        record
        for seed in args.seeds
        if (record := records.find(found, described(args, seed)[1])) is not None
    ]
    print("\n".join([HEAD, *map(row, rows)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
