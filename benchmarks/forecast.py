"""Forecast against fact: the simulator, fitted to one run on the CPU, forecasts it and three
others.

    python -m benchmarks.forecast                  run what is missing, then print
    python -m benchmarks.forecast --print-only     print what is there

Every run has a random policy of 5 million parameters and responses of forced lengths
(`benchmarks.forced_lengths`); the simulation has the same length for each response. Each process
has one thread. A generator has fewer slots than a step has responses, so that its batch grows and
shrinks: only then can the fit separate the cost of a decode step from the cost of a response in it.
The costs are fitted to run A only; the others differ in lag, in batch, and in generators. Two cores
are too few for two generators and a trainer, so these take turns in run D. In the other runs both
sides work at the same time, and their contention is in the costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import lightning as L
import torch

import lrl
from benchmarks import arguments, records
from benchmarks.forced_lengths import forced, long_tailed
from benchmarks.random_policy import hashed, llama, made_up_rows, make_policy
from lrl.callbacks import Throughput, Timeline, WeightSync
from lrl.planning.costs import LinearGenerator, LinearTrainer, fit_generator, fit_trainer
from lrl.planning.simulation import Simulation
from lrl.rollouts.timeline import GroupRecord, Record, StepRecord, read

ROWS = 1024
RESPONSES = 8
LONGEST = 512
PROMPT_TOKENS = 128
KV_GIB = 0.5
BYTES_PER_TOKEN = 2 * 4 * 6 * 256
"""Keys and values of the 5m policy in float32, six layers of 256."""
PARTS = (
    "wait_first_s", "wait_more_s", "wait_last_s", "wait_reward_s", "train_s", "update_s", "sync_s", "other_s", "seconds"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Differences between the runs."""

    about: str
    generators: int = 1
    groups: int = 4
    max_lag: int = 1
    placement: str = "split"
    steps: float = 1.0
    """Multiple of the steps of run A, for about the same duration."""


SCENES = {
    "A": Scene(about="the fitted run"),
    "B": Scene(about="lag 3", max_lag=3),
    "C": Scene(about="twice the batch", groups=8, steps=0.5),
    "D": Scene(
        about="two generators, in turn", generators=2, max_lag=0, placement="shared", steps=0.5
    ),
}
FITTED = "A"


def described(args: argparse.Namespace, name: str) -> dict[str, Any]:
    settings = {
        name: getattr(args, name) for name in ("warmup", "max_num_seqs", "micro_batch_tokens")
    }
    return {
        "run": name,
        **asdict(SCENES[name]),
        "responses": RESPONSES,
        **settings,
        "steps": steps_of(args, name),
    }


def steps_of(args: argparse.Namespace, name: str) -> int:
    return round(args.steps * SCENES[name].steps)


def measure(args: argparse.Namespace, name: str) -> list[Record]:
    scene = SCENES[name]
    rows = list(made_up_rows(ROWS))
    folder = args.folder / name
    policy = args.folder / "policy"
    make_policy(llama("5m"), [row["question"] for row in rows], policy, "cpu")
    (folder / "timeline.jsonl").unlink(missing_ok=True)
    torch.set_num_threads(1)
    server = lrl.ServerSettings(max_num_seqs=args.max_num_seqs, kv_cache_gib=KV_GIB, threads=1)
    strategy = lrl.AsyncSingleDevice(scene.generators, scene.placement, server=server)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 + scene.generators,
        strategy=strategy,
        callbacks=[WeightSync(), Throughput(), Timeline()],
        max_steps=steps_of(args, name),
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    data = lrl.RolloutDataModule(
        prompts=lrl.Prompts(rows, prompt_column=("question"), shuffle=False),  # type: ignore[arg-type]
        rewards=[hashed],
        groups_per_step=scene.groups,
        rollouts_per_group=RESPONSES,
        max_lag=scene.max_lag,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=LONGEST,
        micro_batch_tokens=args.micro_batch_tokens,
    )
    with forced(long_tailed(), ROWS):
        trainer.fit(lrl.PolicyModule(str(policy)), data)
    return read(folder / "timeline.jsonl")


def forecast(
    args: argparse.Namespace,
    name: str,
    generator: LinearGenerator,
    trainer: LinearTrainer,
    prompt_tokens: int,
) -> list[StepRecord]:
    scene = SCENES[name]
    simulation = Simulation(
        generators=[generator] * scene.generators,
        trainer=trainer,
        lengths=long_tailed(),
        steps=steps_of(args, name),
        groups_per_step=scene.groups,
        rollouts_per_group=RESPONSES,
        max_lag=scene.max_lag,
        micro_batch_tokens=args.micro_batch_tokens,
        max_num_seqs=args.max_num_seqs,
        prompt_tokens=prompt_tokens,
        prompts=ROWS,
        placement=scene.placement,  # type: ignore[arg-type]
    )
    return simulation.run().steps


def prompt_tokens(timeline: Sequence[Record]) -> int:
    groups = [record for record in timeline if isinstance(record, GroupRecord)]
    return round(sum(group.prompt_tokens for group in groups) / len(groups))


def medians(steps: Sequence[StepRecord], warmup: int) -> dict[str, float | None]:
    return {
        name: records.rounded(median(getattr(step, name) for step in steps[warmup:]))
        for name in PARTS
    }


def spread(steps: Sequence[StepRecord], warmup: int) -> list[float | None]:
    ordered = sorted(step.seconds for step in steps[warmup:])
    return [
        records.rounded(ordered[len(ordered) // 4]),
        records.rounded(ordered[-1 - len(ordered) // 4]),
    ]


def compare(
    args: argparse.Namespace, name: str, timeline: list[Record], fitted: list[Record]
) -> dict[str, Any]:
    generator = fit_generator(fitted, kv_tokens=int(KV_GIB * 2**30 / BYTES_PER_TOKEN))
    trainer = fit_trainer(fitted)
    facts = [record for record in timeline if isinstance(record, StepRecord)]
    forecasts = forecast(args, name, generator, trainer, prompt_tokens(fitted))
    tokens = (
        [(fact.step, fact.tokens) for fact in facts],
        [(step.step, step.tokens) for step in forecasts],
    )
    return {
        **described(args, name),
        "fact": medians(facts, args.warmup),
        "forecast": medians(forecasts, args.warmup),
        "quarters": spread(facts, args.warmup),
        "run_s": [
            records.rounded(sum(step.seconds for step in steps)) for steps in (facts, forecasts)
        ],
        "same_responses": tokens[0] == tokens[1],
        "generator": asdict(generator),
        "trainer": asdict(trainer),
    }


def error(row: dict[str, Any], part: str = "seconds") -> float:
    return row["forecast"][part] / row["fact"][part] - 1


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        low, high = row["quarters"]
        parts = (f"{f:.2f} / {g:.2f}" for f, g in (pair(row, names) for names in GROUPED.values()))
        lines.append(
            (
                row["run"],
                row["about"],
                f"{row['fact']['seconds']:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{row['forecast']['seconds']:.2f}",
                f"{error(row):+.0%}",
                *parts,
            )
        )
    heads = ("run", "", "fact, s a step", "its middle half", "forecast", "off by", *GROUPED)
    return records.markdown(heads, lines)


GROUPED = {
    "waits: fact / forecast": ("wait_first_s", "wait_more_s", "wait_last_s", "wait_reward_s"),
    "training": ("train_s", "update_s", "other_s"),
    "sync": ("sync_s",),
}


def pair(row: dict[str, Any], parts: Sequence[str]) -> tuple[float, float]:
    return sum(row["fact"][part] for part in parts), sum(row["forecast"][part] for part in parts)


def make_parser() -> argparse.ArgumentParser:
    parser = arguments.make_parser("forecast", __doc__)
    parser.add_argument("--runs", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--steps", type=int, default=20, help="of A and B (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="uncounted steps (%(default)s)")
    parser.add_argument("--max_num_seqs", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--micro_batch_tokens", type=int, default=1024, help="(%(default)s)")
    arguments.add_print_only(parser, "forecast")
    return parser


def sweep(args: argparse.Namespace) -> None:
    args.folder = args.folder.resolve()
    for name in args.runs:
        if records.find(records.read(args.out), described(args, name)) is None:
            timeline = measure(args, name)
            fitted = read(args.folder / FITTED / "timeline.jsonl")
            found = compare(args, name, timeline, fitted)
            records.append(args.out, found | {"command": args.command})


def main(argv: Sequence[str] | None = None) -> int:
    def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
        return [described(args, name) for name in args.runs]

    return arguments.measure_and_print(make_parser(), argv, sweep, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())
