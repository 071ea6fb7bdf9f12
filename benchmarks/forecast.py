"""Forecast against fact: the simulator, fitted to one run on the CPU, forecasts it and three
others.

Every run has a random policy of 5 million parameters and responses of forced lengths
(`benchmarks.forced_lengths`), which are the simulation's, too. A generator has fewer slots than a
step has responses, so that its batch grows and shrinks: only then can the fit separate the cost of
a decode step from the cost of a response in it. Costs are fitted to run A only. Two cores are too
few for two generators and a trainer, so these take turns in run D; in the other runs both sides
work at the same time, and their contention is in the costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.forced_lengths import forced, long_tailed
from benchmarks.random_policy import hashed, made, made_up_rows
from benchmarks.runs import quiet_trainer
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
SETTINGS: dict[str, Any] = {
    "runs": (list(SCENES), "see SCENES", SCENES),
    "steps": (20, "of A and B"),
    "warmup": (3, "steps that do not count"),
    "max_num_seqs": (16, "responses that a generator writes at once"),
    "micro_batch_tokens": (1024, "of one forward pass"),
}
GROUPED = {
    "waits: fact / forecast": ("wait_first_s", "wait_more_s", "wait_last_s", "wait_reward_s"),
    "training": ("train_s", "update_s"),
    "sync": ("sync_s",),
}
"""Columns of the table, and the parts of a step in each."""
PARTS = [*(part for parts in GROUPED.values() for part in parts), "seconds"]


def runs(args: argparse.Namespace) -> Iterator[Row]:
    how = arguments.chosen(args, "warmup", "max_num_seqs", "micro_batch_tokens")
    for name in args.runs:
        scene = SCENES[name]
        steps = round(args.steps * scene.steps)
        yield {"run": name, **asdict(scene), "responses": RESPONSES, **how, "steps": steps}


def train(run: Row, folder: Path) -> list[Record]:
    rows = list(made_up_rows(ROWS))
    policy, own = made("5m", folder, "cpu"), folder / run["run"]
    (own / "timeline.jsonl").unlink(missing_ok=True)
    torch.set_num_threads(1)
    server = lrl.ServerSettings(max_num_seqs=run["max_num_seqs"], kv_cache_gib=KV_GIB, threads=1)
    trainer = quiet_trainer(
        run["steps"],
        own,
        devices=1 + run["generators"],
        strategy=lrl.AsyncSingleDevice(run["generators"], run["placement"], server=server),
        callbacks=[WeightSync(), Throughput(), Timeline()],
    )
    data = lrl.RolloutDataModule(
        prompts=lrl.Prompts(rows, prompt_column="question", shuffle=False),
        rewards=[hashed],
        groups_per_step=run["groups"],
        rollouts_per_group=RESPONSES,
        max_lag=run["max_lag"],
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=LONGEST,
        micro_batch_tokens=run["micro_batch_tokens"],
    )
    with forced(long_tailed(), ROWS):
        trainer.fit(lrl.PolicyModule(str(policy)), data)
    return read(own / "timeline.jsonl")


def simulation(
    run: Row, generator: LinearGenerator, trainer: LinearTrainer, prompt_tokens: int
) -> Simulation:
    return Simulation(
        generators=[generator] * run["generators"],
        trainer=trainer,
        lengths=long_tailed(),
        steps=run["steps"],
        groups_per_step=run["groups"],
        rollouts_per_group=RESPONSES,
        max_lag=run["max_lag"],
        micro_batch_tokens=run["micro_batch_tokens"],
        max_num_seqs=run["max_num_seqs"],
        prompt_tokens=prompt_tokens,
        placement=run["placement"],
    )


def prompt_tokens(timeline: Sequence[Record]) -> int:
    groups = [record for record in timeline if isinstance(record, GroupRecord)]
    return round(sum(group.prompt_tokens for group in groups) / len(groups))


def medians(steps: Sequence[StepRecord]) -> Row:
    return {name: records.rounded(median(getattr(one, name) for one in steps)) for name in PARTS}


def compare(run: Row, timeline: Sequence[Record], fitted: Sequence[Record]) -> Row:
    """Returns the record of a run: fact, and forecast with the costs of the fitted run."""
    generator = fit_generator(fitted, kv_tokens=int(KV_GIB * 2**30 / BYTES_PER_TOKEN))
    trainer = fit_trainer(fitted)
    facts = [record for record in timeline if isinstance(record, StepRecord)]
    forecasts = simulation(run, generator, trainer, prompt_tokens(fitted)).run().steps
    counted = facts[run["warmup"] :]
    return {
        **run,
        "fact": medians(counted),
        "forecast": medians(forecasts[run["warmup"] :]),
        "same_responses": [one.tokens for one in facts] == [one.tokens for one in forecasts],
        "generator": asdict(generator),
        "trainer": asdict(trainer),
    }


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    folder = args.folder.resolve()
    for run in missing:
        timeline = train(run, folder)
        yield compare(run, timeline, read(folder / FITTED / "timeline.jsonl"))


def error(row: Row) -> float:
    return row["forecast"]["seconds"] / row["fact"]["seconds"] - 1


def table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        both = [row["fact"], row["forecast"]]
        seconds = [f"{one['seconds']:.2f}" for one in both]
        parts = (
            " / ".join(f"{sum(one[part] for part in of):.2f}" for one in both)
            for of in GROUPED.values()
        )
        lines.append((row["run"], row["about"], *seconds, f"{error(row):+.0%}", *parts))
    heads = ("run", "", "fact, s a step", "forecast", "off by", *GROUPED)
    return records.markdown(heads, lines)


if __name__ == "__main__":
    arguments.run("forecast", __doc__, SETTINGS, runs, measure, table)
