"""What `lrl plan` writes: a table, the bottleneck in words, and the best plan as a recipe."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lrl.planning.roofline import GB, Cluster, usable
from lrl.planning.search import Plan, on_nodes_of_its_own, runs_today
from lrl.planning.workload import Workload

HOUR = 3600
SEVERAL_NODES = """\
# Several nodes: start it by `lrl ray`, torchrun or SLURM. The generators are tasks of Ray; SLURM may start them, too.
# They are reached in plain HTTP (insecure), which a network of your own allows; else give tls_cert and tls_key.
"""
TIMELINE = "lrl.callbacks.Timeline"


def print_whole(console: Console, table: Table) -> None:
    """Prints a table at its full width; a narrower terminal breaks its lines."""
    # Rich itself would cut and break words to fit a narrow terminal, or a pipe's 80 columns.
    wide = console.options.update(width=sys.maxsize)
    table.width = Measurement.get(console, wide, table).maximum
    console.print(table, crop=False, no_wrap=True, overflow="ignore")


def table(
    plans: Sequence[Plan], cluster: Cluster, workload: Workload, price: float | None
) -> Table:
    """Returns a table with one column a plan, and with prices if a device and hour has one."""

    def devices(plan: Plan) -> str:
        apart = f"{plan.training.devices} + {plan.generation.devices}"
        return f"{plan.devices} in turn" if plan.placement == "shared" else apart

    room = usable(cluster.device) / GB
    rows: dict[str, Callable[[Plan], str]] = {
        "today's lrl": lambda plan: "runs it" if runs_today(plan, cluster) else "cannot yet",
        "devices": devices,
        "lag, at most": lambda plan: f"{plan.lag}",
        "trainer": lambda plan: f"TP {plan.training.costs.tp}",
        "  state spread over": lambda plan: f"{plan.training.costs.shards}",
        "  micro-batch": lambda plan: f"{plan.training.micro_batch_tokens:,}",
        "generators": lambda p: f"{p.generation.generators}, {p.generation.costs.precision}",
        "  each": lambda plan: f"TP {plan.generation.costs.tp}",
        "  responses at once": lambda plan: f"{plan.generation.writing.slots:,}",
        "step (s)": lambda plan: f"{plan.step_s:.3g}",
        "responses a second": lambda plan: f"{workload.samples / plan.step_s:.3g}",
        "trainer waits": lambda plan: f"{plan.idle(plan.training.seconds):.0%}",
        "generators wait": lambda plan: f"{plan.idle(plan.generation.writing.busy_s):.0%}",
        "sync": lambda plan: f"{plan.sync_s / plan.step_s:.1%}",
        "GB a device": lambda plan: f"{plan.memory / GB:.0f} of {room:.0f}",
    }
    if price is not None:
        rows["price of a step"] = lambda plan: f"{price * plan.devices * plan.step_s / HOUR:.3g}"
    numbers = map(str, range(1, len(plans) + 1))
    shown = Table("plan", *numbers, title="Forecasts; nothing here was measured")
    for name, cell in rows.items():
        shown.add_row(name, *map(cell, plans))
    return shown


def in_flight(plan: Plan, workload: Workload) -> str:
    """Explains how many episodes are in flight, and how busy that keeps the generators."""
    writing = plan.generation.writing
    waiting = f", about {writing.at_tools:,.0f} of them waiting for an answer" if plan.lag else ""
    return (
        f"At most {(plan.lag + 1) * workload.samples:,} episodes are in flight (max_lag + 1 = "
        f"{plan.lag + 1} times {workload.prompts:,} prompts times {workload.responses} "
        f"responses){waiting}. In batches as full as that allows, a step's turns take "
        f"{min(1.0, writing.busy_s / plan.step_s):.0%} of the step."
    )


def bottleneck(plan: Plan, workload: Workload) -> str:
    """Explains a plan's step time and how to shorten it."""
    training, writing = plan.training, plan.generation.writing
    longest = f"{workload.longest - workload.prompt_tokens:,} tokens"
    return {
        "training": (
            f"Training binds: it takes {training.seconds:.3g} s on {training.devices} of the "
            "devices, and pacing holds the generators back. A larger cluster or fewer responses "
            "would shorten the step; more lag would not."
        ),
        "writing": (
            f"Writing binds: the generators need {writing.busy_s:.3g} s for a step's responses. A "
            "larger cluster, fewer or shorter responses, or --precision fp8 would shorten the step."
        ),
        "tools": (
            f"Tools bind: an episode waits {workload.tool_s:.3g} s for its environment, and a lag "
            f"of {plan.lag} lets too few be in flight to keep the generators busy meanwhile. More "
            "lag, more prompts or responses, or a faster tool would shorten the step."
        ),
        "longest response": (
            f"The longest response binds: {longest} take {writing.span_s:.3g} s from admission, "
            f"and a lag of {plan.lag} gives them {plan.lag + 1} steps. More lag or a lower limit "
            "on responses would shorten the step."
        ),
        "in turn": (
            f"Both sides take turns: writing ends with the longest response, {longest}, after "
            f"{writing.span_s:.3g} s, and training takes {training.seconds:.3g} s. Separate "
            "devices for each side would let them overlap."
        ),
    }[plan.bound]


def recipe_of(
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    *,
    base: Path,
    model: Path,
    dispatch: Mapping[str, Any] | None,
) -> str:
    """Returns the recipe `base`, without its comments, with the settings of a plan that runs today.

    Its own model stays if `model` is only a config, and its own dispatch if `dispatch` is None. It
    writes a timeline that knows the forecast, for `lrl plan --compare`.
    """
    recipe = _merged(yaml.safe_load(base.read_text()), settings(plan, workload, cluster))
    if dispatch is not None:
        recipe["data"]["init_args"]["dispatch"] = dict(dispatch)
    callbacks = recipe["trainer"].get("callbacks") or []
    recipe["trainer"]["callbacks"] = with_timeline(callbacks, plan.step_s)
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


def with_timeline(callbacks: Sequence[Mapping[str, Any]], step_s: float) -> list[Mapping[str, Any]]:
    """Returns a recipe's callbacks with a `Timeline` that knows the forecast."""
    others = [callback for callback in callbacks if callback["class_path"] != TIMELINE]
    timeline = {"class_path": TIMELINE, "init_args": {"planned_step_s": float(f"{step_s:.4g}")}}
    return [timeline, *others]


def settings(plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """Returns the plan in lrl's settings."""
    training, generation = plan.training, plan.generation
    tp = generation.costs.tp
    server = {
        "dtype": "bfloat16",
        "max_num_seqs": generation.writing.slots,
        "tensor_parallel_size": tp,
    }
    if plan.placement == "shared":
        server["gpu_memory_utilization"] = round(generation.memory / cluster.device.memory, 2)
    several = plan.devices > cluster.devices_per_node
    elsewhere = several and on_nodes_of_its_own(plan, cluster)
    nodes = cluster.nodes_of(training.devices if elsewhere else plan.devices)
    kept = 0 if plan.placement == "shared" or elsewhere else generation.generators // nodes * tp
    whole = "AsyncSingleDevice" if training.devices == 1 else "AsyncDDP"
    name = whole if training.costs.shards == 1 else "AsyncFSDP"
    strategy: dict[str, Any] = {"generator_devices": kept, "server": server}
    if several:
        server |= {"host": "0.0.0.0", "insecure": True}
    if elsewhere:
        jobs = {"jobs": generation.generators}
        strategy["launcher"] = {"class_path": "lrl.members.launchers.Ray", "init_args": jobs}
    if training.costs.tp > 1:
        strategy["tensor_parallel_size"] = training.costs.tp
    data = {
        "groups_per_step": workload.prompts,
        "rollouts_per_group": workload.responses,
        "max_lag": plan.lag,
        "max_prompt_tokens": workload.prompt_tokens,
        "max_response_tokens": workload.longest - workload.prompt_tokens,
        "micro_batch_tokens": training.micro_batch_tokens,
    }
    if workload.episodes is not None:
        data["max_turns"] = round(workload.episodes.turns.longest)
        longest = int(workload.episodes.turn_lengths.longest)
        data["max_turn_tokens"] = min(longest, data["max_response_tokens"])
    held = training.costs.held
    every = held.recompute_every
    policy = {"dtype": held.dtype, "gradient_checkpointing": every if every > 1 else bool(every)}
    return {
        "model": {"init_args": policy},
        "data": {"init_args": data},
        "trainer": {
            "accelerator": "gpu",
            "num_nodes": nodes,
            "devices": training.devices // nodes + kept,
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
