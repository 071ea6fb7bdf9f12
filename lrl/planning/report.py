"""What `lrl plan` writes: a table, the bottleneck in words, and the best plan as a recipe."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from lrl.planning.roofline import GB, Cluster, usable
from lrl.planning.search import Plan
from lrl.planning.workload import Workload

SEVERAL_NODES = """\
# Several nodes: start it by `lrl ray`, torchrun or SLURM. The generators are tasks of Ray; SLURM may start them, too.
# They are reached in plain HTTP (insecure), which a network of your own allows; else give tls_cert and tls_key.
"""


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
    cells = [heads, *([name, *map(cell, plans)] for name, cell in rows.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    return "\n".join(["Forecasts; nothing here was measured:", *lines])


BOTTLENECKS = {
    "training": "Training binds: pacing holds the generators back. A larger cluster or fewer responses "
    "would shorten the step; more lag would not.",
    "writing": "Writing binds: a larger cluster, or fewer or shorter responses would shorten the step.",
    "longest response": "The longest response binds: more lag or shorter ones would help.",
}
"""What `Plan.bound` means."""


def recipe_of(plan: Plan, workload: Workload, cluster: Cluster, *, base: Path, model: Path) -> str:
    """Returns the recipe `base`, without its comments, with the settings of a plan; its own model
    stays if `model` is only a config."""
    merged = OmegaConf.merge(OmegaConf.load(base), settings(plan, workload))
    recipe: Any = OmegaConf.to_container(merged)
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
