"""What `lrl plan` writes: a table, the bottleneck in words, and the best plan as a recipe; with
`--compare` the forecast of a run that has ended, next to the fact.

The costs of that forecast are fitted to the run itself. So differences come from what the simulator
lacks, such as other load on the machine, and not from a machine unlike its data sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import yaml

from lrl.generators.settings import ServerSettings
from lrl.planning.costs import fit_generator, fit_trainer
from lrl.planning.roofline import GB, Cluster, usable
from lrl.planning.search import Plan
from lrl.planning.workload import ReplayedLengths, Workload
from lrl.rollouts.timeline import GroupRecord, Record, StepRecord, read

if TYPE_CHECKING:
    from lrl.planning.simulation import Simulation

SEVERAL_NODES = """\
# Several nodes: start it by `lrl ray`, torchrun or SLURM. The generators are tasks of Ray; SLURM may start them, too.
# They are reached in plain HTTP (insecure), which a network of your own allows; else give tls_cert and tls_key.
"""
TIMELINE = "lrl.callbacks.Timeline"
SIMULATED = ("groups_per_step", "rollouts_per_group", "max_lag", "stragglers", "micro_batch_tokens")
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


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def table(plans: Sequence[Plan], workload: Workload) -> str:
    """Returns a table with one column a plan."""
    rows: dict[str, Callable[[Plan], str]] = {
        "devices": lambda p: f"{p.training.costs.devices} + {p.generation.devices}",
        "lag, at most": lambda plan: f"{plan.lag}",
        "trainer": lambda plan: f"TP {plan.training.costs.tp}",
        "  state spread over": lambda plan: f"{plan.training.costs.shards}",
        "  micro-batch": lambda plan: f"{plan.training.micro_batch_tokens:,}",
        "generators": lambda plan: f"{plan.generation.generators}",
        "  each": lambda plan: f"TP {plan.generation.costs.tp}",
        "  responses at once": lambda plan: f"{plan.generation.writing.slots:,}",
        "step (s)": lambda plan: f"{plan.step_s:.3g}",
        "responses a second": lambda plan: f"{workload.samples / plan.step_s:.3g}",
        "trainer waits": lambda plan: f"{plan.idle(plan.training.seconds):.0%}",
        "generators wait": lambda plan: f"{plan.idle(plan.generation.writing.busy_s):.0%}",
        "sync": lambda plan: f"{plan.sync_s / plan.step_s:.1%}",
        "GB a device": lambda p: f"{p.memory / GB:.0f} of {usable(p.cluster.device) / GB:.0f}",
    }
    heads = ["plan", *map(str, range(1, len(plans) + 1))]
    cells = ([name, *map(cell, plans)] for name, cell in rows.items())
    return f"Forecasts; nothing here was measured:\n{aligned([heads, *cells])}"


BOTTLENECKS = {
    "training": "Training binds: pacing holds the generators back. A larger cluster or fewer responses "
    "would shorten the step; more lag would not.",
    "writing": "Writing binds: a larger cluster, or fewer or shorter responses would shorten the step.",
    "longest response": "The longest response binds: more lag or shorter ones would help.",
}
"""What `Plan.bound` means."""


def recipe_of(plan: Plan, workload: Workload, cluster: Cluster, *, base: Path, model: Path) -> str:
    """Returns the recipe `base`, without its comments, with the settings of a plan.

    Its own model stays if `model` is only a config. It writes a timeline for `lrl plan --compare`.
    """
    recipe = _merged(yaml.safe_load(base.read_text()), settings(plan, workload))
    callbacks = recipe["trainer"].get("callbacks") or []
    others = [callback for callback in callbacks if callback["class_path"] != TIMELINE]
    recipe["trainer"]["callbacks"] = [{"class_path": TIMELINE}, *others]
    folder = model if model.is_dir() else model.parent
    if any(folder.glob("*.safetensors")):
        recipe["model"]["init_args"]["model"] = str(folder.absolute())
    head = (
        f"# Planned by lrl for {cluster}: {plan.step_s:.3g} s a step forecast, nothing measured.\n"
        f"# Data, rewards and callbacks are from {base.name}.\n"
    )
    if plan.devices > cluster.devices_per_node:
        head += SEVERAL_NODES
    return head + yaml.safe_dump(recipe, sort_keys=False)


def settings(plan: Plan, workload: Workload) -> dict[str, Any]:
    """Returns the plan in lrl's settings."""
    training, generation, cluster = plan.training, plan.generation, plan.cluster
    trainers, tp = training.costs.devices, generation.costs.tp
    server = {
        "dtype": "bfloat16",
        "max_num_seqs": generation.writing.slots,
        "tensor_parallel_size": tp,
    }
    nodes = cluster.nodes_of(trainers if plan.trainer_apart else cluster.count)
    kept = 0 if plan.trainer_apart else generation.generators // nodes * tp
    whole = "AsyncSingleDevice" if trainers == 1 else "AsyncDDP"
    name = whole if training.costs.shards == 1 else "AsyncFSDP"
    strategy: dict[str, Any] = {"generator_devices": kept, "server": server}
    if plan.devices > cluster.devices_per_node:
        server |= {"host": "0.0.0.0", "insecure": True}
    if plan.trainer_apart:
        jobs = {"jobs": generation.generators}
        strategy["launcher"] = {"class_path": "lrl.members.launchers.Ray", "init_args": jobs}
    if training.costs.tp > 1:
        strategy["tensor_parallel_size"] = training.costs.tp
    held = training.costs.held
    every = held.recompute_every
    policy = {"dtype": held.dtype, "gradient_checkpointing": every if every > 1 else bool(every)}
    data = {
        "groups_per_step": workload.prompts,
        "rollouts_per_group": workload.responses,
        "max_lag": plan.lag,
        "max_prompt_tokens": workload.prompt_tokens,
        "max_response_tokens": workload.longest - workload.prompt_tokens,
        "micro_batch_tokens": training.micro_batch_tokens,
    }
    return {
        "model": {"init_args": policy},
        "data": {"init_args": data},
        "trainer": {
            "accelerator": "gpu",
            "num_nodes": nodes,
            "devices": trainers // nodes + kept,
            "precision": "bf16-mixed" if held.dtype == "float32" else "32-true",
            "strategy": {"class_path": f"lrl.{name}", "init_args": strategy},
        },
    }


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the leaves of `change` in their places."""
    both = dict(base)
    for name, value in change.items():
        inner = isinstance(both.get(name), Mapping) and isinstance(value, Mapping)
        both[name] = _merged(both[name], value) if inner else value
    return both


def compare(folder: Path) -> str:
    """Returns a table of a run's medians: fact, forecast, and the relative error."""
    both = read_run(folder)
    rows = {
        name: [median(getattr(step, part) for step in steps) for steps in both]
        for name, part in PARTS.items()
    }
    config = read_config(folder)
    data = config["data"]["init_args"]
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
    from lrl.planning.simulation import Simulation  # it imports torch

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
        **{name: data[name] for name in SIMULATED if name in data},
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
