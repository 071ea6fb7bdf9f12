"""A plan as a recipe: what today's lrl can run of it, on top of a recipe that has data, rewards and callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lrl.planning.devices import Cluster
from lrl.planning.search import Plan
from lrl.planning.workload import Workload


def runs_today(plan: Plan, cluster: Cluster) -> bool:
    """Whether lrl can run the plan: one device trains, in one node, and weights travel in bfloat16.

    A shared plan of one device counts, though there both sides then work at the same time instead of in turn.
    """
    one_trainer = plan.training.devices == 1
    return one_trainer and plan.generation.precision == "bf16" and plan.devices <= cluster.devices_per_node


def write_recipe(path: Path, plan: Plan, workload: Workload, cluster: Cluster, base: Path, model: Path) -> None:
    """Write `base` with the plan's settings in their places; its comments are lost.

    Args:
        path: The file; it is replaced.
        plan: One that `runs_today`.
        workload: What it was planned for.
        cluster: Where.
        base: A recipe.
        model: The policy; the recipe's own stays if this is only a config.
    """
    recipe = merged(yaml.safe_load(base.read_text()), settings(plan, workload, cluster))
    folder = model if model.is_dir() else model.parent
    if any(folder.glob("*.safetensors")):
        recipe["model"]["init_args"]["model"] = str(folder.absolute())
    head = (
        f"# Planned by lrl for {cluster}: {plan.step_s:.3g} s a step forecast, nothing measured.\n"
        f"# Data, rewards and callbacks are those of {base.name}.\n"
    )
    path.write_text(head + yaml.safe_dump(recipe, sort_keys=False))


def settings(plan: Plan, workload: Workload, cluster: Cluster) -> dict[str, Any]:
    """The plan in lrl's own settings."""
    generation = plan.generation
    server: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_num_seqs": generation.writing.slots,
        "tensor_parallel_size": generation.tp,
    }
    if plan.placement == "shared":
        server["gpu_memory_utilization"] = round(generation.memory / cluster.device.memory, 2)
    kept = 0 if plan.placement == "shared" else generation.generators * generation.tp
    strategy = {"class_path": "lrl.AsyncSingleDevice", "init_args": {"generator_devices": kept, "server": server}}
    return {
        "model": {"init_args": {"dtype": "float32", "gradient_checkpointing": True}},
        "data": {
            "init_args": {
                "groups_per_step": workload.prompts,
                "rollouts_per_group": workload.answers,
                "max_lag": plan.lag,
                "max_prompt_tokens": workload.prompt_tokens,
                "max_response_tokens": workload.longest - workload.prompt_tokens,
                "micro_batch_tokens": plan.training.micro_batch_tokens,
            }
        },
        "trainer": {
            "accelerator": "gpu",
            "devices": plan.training.devices + kept,
            "precision": "bf16-mixed",
            "strategy": strategy,
        },
    }


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `change` in their places."""
    both = dict(base)
    for name, value in change.items():
        old = both.get(name)
        both[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both
