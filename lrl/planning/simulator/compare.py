"""Forecast beside fact, after a run: `lrl plan --compare RUN`.

    timeline.jsonl  ->  costs and lengths of responses  \\
    config.yaml     ->  settings                       -> simulation -> its steps beside the run's

The costs are the run's own. So what differs is not that a machine was faster or slower than its data sheet; it is what
the simulator leaves out or gets wrong: waits, order, contention, what happened beside the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.table import Table

from lrl.generators.settings import ServerSettings
from lrl.planning.planner.recipe import TIMELINE
from lrl.planning.profiling.calibration import fit_generator, fit_trainer
from lrl.planning.profiling.timeline import GroupRecord, Record, StepRecord, read
from lrl.planning.simulator.length_sampling import ReplayedLengths
from lrl.planning.simulator.simulate import Simulation

TIMELINE_FILE, CONFIG_FILE = "timeline.jsonl", "config.yaml"
SETTINGS = ("groups_per_step", "rollouts_per_group", "max_lag", "stragglers", "micro_batch_tokens")
"""Of the data module, that a simulation takes by the same names."""
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
"""What the table calls the fields of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's steps behind its start, and their forecast."""

    steps: Sequence[StepRecord]
    forecast: Sequence[StepRecord]
    responses_per_step: int
    planned_step_s: float | None
    """Of the plan that the run was made by, if it was."""
    left_out: Sequence[str]
    """Settings that the simulator does not know."""


def read_run(folder: Path) -> Run:
    """Read a run's folder and forecast the run.

    Raises:
        FileNotFoundError: It has no timeline or no config.
        ValueError: One of them does not hold what it should.
    """
    timeline, config = read(_found(folder, TIMELINE_FILE)), _config(_found(folder, CONFIG_FILE))
    steps = [record for record in timeline if isinstance(record, StepRecord)]
    simulation = simulated(timeline, len(steps), config)
    behind_start = len(steps) // 5
    data = config["data"]["init_args"]
    return Run(
        steps=steps[behind_start:],
        forecast=simulation.run().steps[behind_start:],
        responses_per_step=simulation.groups_per_step * simulation.rollouts_per_group,
        planned_step_s=_planned(config),
        left_out=[name for name in ("replay", "max_skipped_per_step", "dispatch", "migration") if data.get(name)],
    )


def simulated(timeline: Sequence[Record], steps: int, config: Mapping[str, Any]) -> Simulation:
    """The run as a simulation: with its own settings, costs and answers.

    Raises:
        ValueError: The timeline has no work to fit costs to, or no group.
    """
    groups = sorted((r for r in timeline if isinstance(r, GroupRecord)), key=lambda group: group.index)
    if not groups:
        raise ValueError(f'{TIMELINE_FILE} has no record of kind "group". Give that of a run that has trained.')
    data, strategy = config["data"]["init_args"], config["trainer"]["strategy"]["init_args"]
    server = {"max_num_seqs": ServerSettings.max_num_seqs, "tensor_parallel_size": 1} | (strategy.get("server") or {})
    longest = max(group.prompt_tokens + max(group.lengths) for group in groups)
    costs = fit_generator(timeline, kv_tokens=server["max_num_seqs"] * longest + longest)
    writing = max(1, strategy.get("generator_devices", 1) // server["tensor_parallel_size"])
    return Simulation(
        generators=[costs] * (writing - strategy.get("evaluation_generators", 0)),
        trainer=fit_trainer(timeline),
        lengths=ReplayedLengths([group.lengths for group in groups]),
        steps=steps,
        max_num_seqs=server["max_num_seqs"],
        ranks=trainer_ranks(config["trainer"]),
        prompt_tokens=round(sum(group.prompt_tokens for group in groups) / len(groups)),
        placement=strategy.get("placement", "split"),
        **{name: data[name] for name in SETTINGS if name in data},
    )


def trainer_ranks(trainer: Mapping[str, Any]) -> int:
    """How many ranks trained.

    Raises:
        ValueError: The settings have no number of devices.
    """
    strategy, devices = trainer["strategy"], str(trainer.get("devices"))
    if not str(strategy.get("class_path")).endswith(".AsyncDDP"):
        return 1
    if not devices.isdigit():
        raise ValueError(f"trainer.devices is {devices} in {CONFIG_FILE}: write there how many the run had.")
    return int(devices) - int(strategy["init_args"].get("generator_devices", 1))


def table(run: Run) -> Table:
    """Medians of the steps behind the start: fact, forecast, and how far it is off."""
    shown = Table("seconds a step, medians", "fact", "forecast", "off by", title="Forecast with the run's own costs")
    for name, part in PARTS.items():
        shown.add_row(name, *_cells(*(median(getattr(s, part) for s in steps) for steps in (run.steps, run.forecast))))
    shown.add_row("responses a second", *_cells(*(_responses_per_s(run, steps) for steps in (run.steps, run.forecast))))
    if run.planned_step_s is not None:
        fact = median(step.seconds for step in run.steps)
        shown.add_row("step, as planned from data sheets", *_cells(fact, run.planned_step_s))
    if run.left_out:
        shown.caption = f"Not in the forecast: data.{', data.'.join(run.left_out)}."
    return shown


def _responses_per_s(run: Run, steps: Sequence[StepRecord]) -> float:
    return run.responses_per_step * len(steps) / sum(step.seconds for step in steps)


def _cells(fact: float, forecast: float) -> tuple[str, str, str]:
    off = f"{forecast / fact - 1:+.0%}" if fact > 0 else ""
    return f"{fact:.3g}", f"{forecast:.3g}", off


def _found(folder: Path, name: str) -> Path:
    remedy = {
        TIMELINE_FILE: "Add the callback lrl.callbacks.Timeline behind lrl.callbacks.Throughput, and run again.",
        CONFIG_FILE: "`lrl fit` writes it; a run of a Python script has none and cannot be compared.",
    }
    if not folder.is_dir():
        raise FileNotFoundError(f"--compare is {str(folder)!r}, and there is no such folder. Give that of a run.")
    if not (folder / name).is_file():
        raise FileNotFoundError(f"--compare is {str(folder)!r}, a folder without {name}. {remedy[name]}")
    return folder / name


def _config(path: Path) -> dict[str, Any]:
    """The run's settings; those that a comparison needs are there."""
    needed: dict[str, Callable[[Any], Any]] = {
        "data.init_args": lambda config: config["data"]["init_args"],
        "trainer.strategy.init_args": lambda config: config["trainer"]["strategy"]["init_args"],
    }
    try:
        config = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    for name, get in needed.items():
        try:
            get(config)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} has no {name}; give the folder of a run of `lrl fit`.") from error
    return config


def _planned(config: Mapping[str, Any]) -> float | None:
    callbacks = config["trainer"].get("callbacks") or []
    found = [one.get("init_args") or {} for one in callbacks if one["class_path"] == TIMELINE]
    return found[0].get("planned_step_s") if found else None
