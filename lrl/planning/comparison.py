"""The forecast of a run that has ended, next to the fact (`lrl plan --compare`).

`timeline.jsonl` has costs and lengths of responses, `config.yaml` the settings. The costs are fitted
to the run itself. Differences then do not come from a machine that is faster or slower than its
data sheet, but from the simulator's gaps and errors: waits, order, contention, other load on the
machine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from lrl.generators.settings import ServerSettings
from lrl.planning.costs import fit_generator, fit_trainer
from lrl.planning.report import TIMELINE, aligned
from lrl.planning.responses import ReplayedLengths
from lrl.planning.simulation import Simulation
from lrl.rollouts.timeline import GroupRecord, Record, StepRecord, read

SETTINGS = ("groups_per_step", "rollouts_per_group", "max_lag", "stragglers", "micro_batch_tokens")
"""Settings of the data module that a simulation has by the same names."""
UNKNOWN = ("environment", "replay", "max_skipped_per_step", "dispatch", "migration")
"""Settings that a simulation does not have."""
PARTS = {
    "waits for the first group": "wait_first_s",
    "waits for more": "wait_more_s",
    "waits for the last": "wait_last_s",
    "waits for rewards": "wait_reward_s",
    "trains": "train_s",
    "updates, packs, and the rest": "update_s",
    "syncs": "sync_s",
    "  generators pause": "pause_s",
    "step": "seconds",
    "generation of a step": "generation_s",
}
"""The names of a step's fields in the table of a run."""


def compare(folder: Path) -> str:
    """Returns a table of a run's medians: fact, forecast, and the relative error."""
    both = read_run(folder)
    rows = {
        name: [median(getattr(step, part) for step in steps) for steps in both]
        for name, part in PARTS.items()
    }
    config = read_config(folder)
    data, callbacks = config["data"]["init_args"], config["trainer"].get("callbacks") or []
    for one in callbacks:
        planned = (one.get("init_args") or {}).get("planned_step_s")
        if one["class_path"] == TIMELINE and planned is not None:
            rows["step, as planned from data sheets"] = [rows["step"][0], planned]
    lines = [("seconds a step, medians", "fact", "forecast", "off by")]
    for name, (fact, forecast) in rows.items():
        off_by = f"{forecast / fact - 1:+.0%}" if fact > 0 else ""
        lines.append((name, f"{fact:.3g}", f"{forecast:.3g}", off_by))
    text = f"Forecast with the run's own costs:\n{aligned(lines)}"
    if left_out := [f"data.{name}" for name in UNKNOWN if data.get(name)]:
        text += f"\nNot in the forecast: {', '.join(left_out)}."
    return text


def read_run(folder: Path) -> tuple[list[StepRecord], list[StepRecord]]:
    """Returns the steps of a run after its first fifth, and their forecast. The run's folder has
    `timeline.jsonl`, which the callback `Timeline` writes, and `config.yaml`, which `lrl fit`
    writes; raises ValueError if one has the wrong content."""
    timeline = read(folder / "timeline.jsonl")
    simulation = _simulation(timeline, read_config(folder))
    steps = [record for record in timeline if isinstance(record, StepRecord)]
    start = len(steps) // 5
    return steps[start:], simulation.run().steps[start:]


def read_config(folder: Path) -> Any:
    return yaml.safe_load((folder / "config.yaml").read_text())


def _simulation(timeline: Sequence[Record], config: Mapping[str, Any]) -> Simulation:
    data, trainer = config["data"]["init_args"], config["trainer"]
    groups = [record for record in timeline if isinstance(record, GroupRecord)]
    groups.sort(key=lambda group: group.index)
    of_trainer = fit_trainer(timeline)  # raises the error of an empty timeline
    steps = [record for record in timeline if isinstance(record, StepRecord)]
    ranks, writing = _division(trainer)
    strategy = trainer["strategy"]["init_args"]
    server = {"max_num_seqs": ServerSettings.max_num_seqs, "tensor_parallel_size": 1}
    server |= strategy.get("server") or {}
    generators = max(1, writing // server["tensor_parallel_size"])
    longest = max(group.prompt_tokens + max(group.lengths) for group in groups)
    costs = fit_generator(timeline, kv_tokens=server["max_num_seqs"] * longest + longest)
    return Simulation(
        generators=[costs] * (generators - strategy.get("evaluation_generators", 0)),
        trainer=of_trainer,
        lengths=ReplayedLengths([group.lengths for group in groups]),
        steps=len(steps),
        max_num_seqs=server["max_num_seqs"],
        ranks=ranks,
        prompt_tokens=round(fmean(group.prompt_tokens for group in groups)),
        placement=strategy.get("placement", "split"),
        attention_tokens=max(step.attention_tokens for step in steps),
        **{name: data[name] for name in SETTINGS if name in data},
    )


def _division(trainer: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the ranks that train, and the devices of the generators."""
    strategy = trainer["strategy"]
    kept = strategy["init_args"].get("generator_devices")
    several = strategy["class_path"].endswith((".AsyncDDP", ".AsyncFSDP"))
    if kept is not None and not several:
        return 1, int(kept)
    devices = str(trainer.get("devices"))
    if not devices.isdecimal():
        raise ValueError(f"trainer.devices is {devices} in config.yaml: write how many there were.")
    if not several:
        return 1, int(devices) - 1
    kept = 1 if kept is None else int(kept)
    return int(devices) - kept, kept
