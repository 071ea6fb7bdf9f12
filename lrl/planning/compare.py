"""Forecast and fact, compared after a run: `lrl plan --compare RUN`.

    timeline.jsonl  ->  costs and lengths of responses  \\
    config.yaml     ->  settings                       -> simulation -> its steps next to the run's

The costs are fitted to the run itself. Differences then do not come from a machine that is faster
or slower than its data sheet, but from the simulator's gaps and errors: waits, order, contention,
other load on the machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.table import Table

from lrl.generators.settings import ServerSettings
from lrl.planning.costs import fit_generator, fit_trainer
from lrl.planning.report import TIMELINE
from lrl.planning.responses import (
    Answer,
    LengthSampler,
    ObservedLengths,
    ReplayedEpisodes,
    ReplayedLengths,
)
from lrl.planning.simulation import Simulation
from lrl.rollouts.timeline import GroupRecord, Record, StepRecord, read

SETTINGS = ("groups_per_step", "rollouts_per_group", "max_lag", "stragglers", "micro_batch_tokens")
"""Settings of the data module that a simulation has by the same names."""
UNKNOWN = ("replay", "max_skipped_per_step", "dispatch", "migration")
"""Settings that a simulation does not have."""
PARTS = {
    "waits for the first group": "wait_first_s",
    "waits for more": "wait_more_s",
    "waits for the last": "wait_last_s",
    "waits for rewards": "wait_reward_s",
    "trains": "train_s",
    "updates": "update_s",
    "packs, and the rest": "other_s",
    "syncs": "sync_s",
    "  generators pause": "pause_s",
    "step": "seconds",
    "generation of a step": "generation_s",
}
"""The table's names for the fields of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run's steps after its first fifth, and their forecast."""

    steps: Sequence[StepRecord]
    forecast: Sequence[StepRecord]
    responses_per_step: int
    planned_step_s: float | None
    """Seconds a step of the run's plan, if it has one."""
    left_out: Sequence[str]
    """Settings that the simulator does not know."""


def read_run(folder: Path, tool_ms: Sequence[float] | None = None) -> Comparison:
    """Reads a run's folder and forecasts the run.

    Args:
        folder: With `timeline.jsonl`, which the callback `Timeline` writes, and `config.yaml`, which
            `lrl fit` writes.
        tool_ms: Milliseconds of answers of its environment, which no timeline has; None for none.

    Raises:
        ValueError: One of them has the wrong content.
    """
    timeline = read(folder / "timeline.jsonl")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    data, trainer = config["data"]["init_args"], config["trainer"]
    waits = ObservedLengths(tool_ms) if tool_ms else None
    simulation = _simulation(timeline, data, trainer, waits)
    steps = [record for record in timeline if isinstance(record, StepRecord)]
    start = len(steps) // 5
    callbacks = trainer.get("callbacks") or []
    timelines = [one.get("init_args") or {} for one in callbacks if one["class_path"] == TIMELINE]
    return Comparison(
        steps=steps[start:],
        forecast=simulation.run().steps[start:],
        responses_per_step=simulation.groups_per_step * simulation.rollouts_per_group,
        planned_step_s=timelines[0].get("planned_step_s") if timelines else None,
        left_out=[name for name in UNKNOWN if data.get(name)],
    )


def _simulation(
    timeline: Sequence[Record],
    data: Mapping[str, Any],
    trainer: Mapping[str, Any],
    tool_ms: LengthSampler | None,
) -> Simulation:
    groups = [record for record in timeline if isinstance(record, GroupRecord)]
    groups.sort(key=lambda group: group.index)
    of_trainer = fit_trainer(timeline)  # raises the error of an empty timeline
    steps = [record for record in timeline if isinstance(record, StepRecord)]
    strategy = trainer["strategy"]["init_args"]
    server = {"max_num_seqs": ServerSettings.max_num_seqs, "tensor_parallel_size": 1}
    server |= strategy.get("server") or {}
    longest = max(group.prompt_tokens + max(group.lengths) for group in groups)
    costs = fit_generator(timeline, kv_tokens=server["max_num_seqs"] * longest + longest)
    writing = max(1, _generator_devices(trainer) // server["tensor_parallel_size"])
    return Simulation(
        generators=[costs] * (writing - strategy.get("evaluation_generators", 0)),
        trainer=of_trainer,
        lengths=ReplayedLengths([_first_turns(group) for group in groups]),
        steps=len(steps),
        max_num_seqs=server["max_num_seqs"],
        ranks=_ranks(trainer),
        prompt_tokens=round(sum(group.prompt_tokens for group in groups) / len(groups)),
        placement=strategy.get("placement", "split"),
        episodes=_episodes(groups, tool_ms),
        # A timeline counts the whole prompt of a turn as read, so its fitted costs are for that.
        prefix_cache=False,
        attention_tokens=max(step.attention_tokens for step in steps),
        **{name: data[name] for name in SETTINGS if name in data},
    )


def _first_turns(group: GroupRecord) -> list[int]:
    """Returns the tokens of each response, or of each first turn; 1 of one that failed in it."""
    if not group.turns:
        return group.lengths
    return [turns[0][1] if turns else 1 for turns in group.turns]


def _episodes(
    groups: Sequence[GroupRecord], tool_ms: LengthSampler | None
) -> ReplayedEpisodes | None:
    if not any(group.turns for group in groups):
        return None
    played = [
        [Answer(max(1, observation), tokens) for observation, tokens in turns[1:]]
        for group in groups
        for turns in group.turns
    ]
    return ReplayedEpisodes(played, tool_ms)


def _ranks(trainer: Mapping[str, Any]) -> int:
    several = trainer["strategy"]["class_path"].endswith((".AsyncDDP", ".AsyncFSDP"))
    return _devices(trainer) - _generator_devices(trainer) if several else 1


def _generator_devices(trainer: Mapping[str, Any]) -> int:
    strategy = trainer["strategy"]
    given = strategy["init_args"].get("generator_devices")
    if given is not None:
        return int(given)
    return _devices(trainer) - 1 if strategy["class_path"].endswith(".AsyncSingleDevice") else 1


def _devices(trainer: Mapping[str, Any]) -> int:
    devices = str(trainer.get("devices"))
    if not devices.isdecimal():
        raise ValueError(f"trainer.devices is {devices} in config.yaml: write how many there were.")
    return int(devices)


def table(run: Comparison) -> Table:
    """Returns the medians of the steps: fact, forecast, and the relative error."""
    shown = Table(
        "seconds a step, medians",
        "fact",
        "forecast",
        "off by",
        title="Forecast with the run's own costs",
    )

    def add(name: str, fact: float, forecast: float) -> None:
        off_by = f"{forecast / fact - 1:+.0%}" if fact > 0 else ""
        shown.add_row(name, f"{fact:.3g}", f"{forecast:.3g}", off_by)

    both = run.steps, run.forecast
    for name, part in PARTS.items():
        add(name, *(median(getattr(step, part) for step in steps) for steps in both))
    seconds = (sum(step.seconds for step in steps) / len(steps) for steps in both)
    add("responses a second", *(run.responses_per_step / mean for mean in seconds))
    if run.planned_step_s is not None:
        fact = median(step.seconds for step in run.steps)
        add("step, as planned from data sheets", fact, run.planned_step_s)
    if run.left_out:
        shown.caption = f"Not in the forecast: data.{', data.'.join(run.left_out)}."
    return shown
