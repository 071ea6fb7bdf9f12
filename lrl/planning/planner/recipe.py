"""A plan as a recipe, on top of a recipe with data, rewards and callbacks.

The recipe also writes a timeline that knows the forecast, for `lrl plan --compare`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lrl.planning.planner.devices import Cluster
from lrl.planning.planner.runnable_today import on_nodes_of_its_own
from lrl.planning.planner.search import Plan
from lrl.planning.planner.workload import Workload

SEVERAL_NODES = """\
# Several nodes: start it by `lrl ray`, torchrun or SLURM. The generators are tasks of Ray; SLURM may start them, too.
# They are reached in plain HTTP (insecure), which a network of your own allows; else give tls_cert and tls_key.
"""
THROUGHPUT = "lrl.callbacks.Throughput"
TIMELINE = "lrl.callbacks.Timeline"


def write_recipe(
    path: Path,
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    base: Path,
    model: Path,
    dispatch: Mapping[str, Any] | None = None,
) -> None:
    """Writes the recipe `base` with the settings of a plan that runs today; its comments are lost.

    The recipe's own model stays if `model` is only a config, and its own dispatch if `dispatch` is
    None.
    """
    recipe = _merged(yaml.safe_load(base.read_text()), settings(plan, workload, cluster))
    if dispatch is not None:
        recipe["data"]["init_args"]["dispatch"] = dict(dispatch)
    recipe["trainer"]["callbacks"] = with_timeline(
        recipe["trainer"].get("callbacks") or [], plan.step_s
    )
    folder = model if model.is_dir() else model.parent
    if any(folder.glob("*.safetensors")):
        recipe["model"]["init_args"]["model"] = str(folder.absolute())
    head = (
        f"# Planned by lrl for {cluster}: {plan.step_s:.3g} s a step forecast, nothing measured.\n"
        f"# Data, rewards and callbacks are from {base.name}.\n"
    )
    if plan.devices > cluster.devices_per_node:
        head += SEVERAL_NODES
    path.write_text(head + yaml.safe_dump(recipe, sort_keys=False))


def with_timeline(callbacks: Sequence[Mapping[str, Any]], step_s: float) -> list[Mapping[str, Any]]:
    """Returns a recipe's callbacks with a `Timeline` that knows the forecast, after its
    `Throughput`."""
    others = [callback for callback in callbacks if callback["class_path"] != TIMELINE]
    if not any(callback["class_path"] == THROUGHPUT for callback in others):
        others.append({"class_path": THROUGHPUT})
    index = 1 + next(
        position for position, callback in enumerate(others) if callback["class_path"] == THROUGHPUT
    )
    timeline = {"class_path": TIMELINE, "init_args": {"planned_step_s": float(f"{step_s:.4g}")}}
    return [*others[:index], timeline, *others[index:]]


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
        launcher = {
            "class_path": "lrl.members.launchers.Ray",
            "init_args": {"jobs": generation.generators},
        }
        strategy["launcher"] = launcher
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
    return {
        "model": {"init_args": {"dtype": "float32", "gradient_checkpointing": True}},
        "data": {"init_args": data},
        "trainer": {
            "accelerator": "gpu",
            "num_nodes": nodes,
            "devices": training.devices // nodes + kept,
            "precision": "bf16-mixed",
            "strategy": {"class_path": f"lrl.{name}", "init_args": strategy},
        },
    }


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with the leaves of `change` in their places."""
    both = dict(base)
    for name, value in change.items():
        old = both.get(name)
        both[name] = (
            _merged(old, value)
            if isinstance(old, Mapping) and isinstance(value, Mapping)
            else value
        )
    return both
