"""Plans that lrl can run today, and the nearest cluster with one.

`lrl.AsyncSingleDevice` and `lrl.AsyncDDP` keep the whole policy, its gradient and the optimizer's
state on each trainer device, `lrl.AsyncFSDP` a share, also with tensor parallelism. Trainer and
generators share one node; or each has whole nodes, and a launcher starts the generators; or they
share several nodes, as many devices of either on each. Weights move in bfloat16. The rest are
forecasts.
"""

from collections.abc import Iterator
from dataclasses import replace

from lrl.planning.planner import memory
from lrl.planning.planner.devices import GB, SHEETS, Cluster
from lrl.planning.planner.layouts import Layouts, Training
from lrl.planning.planner.search import Plan, asynchronous, best, synchronous


def runs_today(plan: Plan, cluster: Cluster) -> bool:
    """Returns whether lrl can run the plan. A shared plan of one device counts, though its sides
    then run concurrently and not in turn."""
    generation, node = plan.generation.costs, cluster.devices_per_node
    plain = generation.precision == "bf16" and generation.tp <= node and divides(plan.training)
    if plan.placement == "shared":
        return plain and plan.devices == 1
    several = on_nodes_of_its_own(plan, cluster) or evenly_on_nodes(plan, cluster)
    return plain and (plan.devices <= node or several)


def divides(training: Training) -> bool:
    """Returns whether lrl has the trainer's tensor parallelism: of a model without experts, by a
    number that divides its heads, in two or more groups."""
    costs, shape = training.costs, training.costs.shape
    whole_heads = shape.heads % costs.tp == shape.kv_heads % costs.tp == 0
    return costs.tp == 1 or (
        shape.experts == 1 and whole_heads and 2 * costs.tp <= training.devices == costs.shards
    )


def on_nodes_of_its_own(plan: Plan, cluster: Cluster) -> bool:
    """Returns whether the trainer has whole nodes, with as many devices on each, and the generators
    have others."""
    node, trainers = cluster.devices_per_node, plan.training.devices
    nodes = cluster.nodes_of(trainers) + cluster.nodes_of(plan.generation.devices)
    return (trainers <= node or trainers % node == 0) and nodes <= cluster.nodes_of(cluster.count)


def evenly_on_nodes(plan: Plan, cluster: Cluster) -> bool:
    """Returns whether each node can have as many trainer devices as the others, and as many whole
    generators."""
    nodes = cluster.nodes_of(plan.devices)
    equal = plan.training.devices % nodes == 0 and plan.generation.generators % nodes == 0
    return equal and plan.devices <= cluster.count


def plans_today(layouts: Layouts, cluster: Cluster, max_lag: int) -> Iterator[Plan]:
    """Yields all plans that lrl can run on one node of a cluster, and on several of them."""
    node = replace(cluster, count=min(cluster.count, cluster.devices_per_node))
    plain = replace(layouts, precisions=("bf16",), trainer_tp=1)
    yield from asynchronous(plain, node, max_lag, shards=1)
    yield from (plan for plan in asynchronous(plain, node, max_lag) if plan.training.devices > 1)
    if node.count == 1:
        yield from synchronous(plain, node)
    divided = replace(plain, trainer_tp=None)
    later = [*asynchronous(divided, node, max_lag)]
    if cluster.count > node.count:
        later += [*asynchronous(plain, cluster, max_lag), *asynchronous(divided, cluster, max_lag)]
    yield from (plan for plan in later if runs_today(plan, cluster) and plan.training.devices > 1)


def why_none(layouts: Layouts, cluster: Cluster, max_lag: int) -> str:
    """Explains why there is no such plan, with the nearest cluster and size of policy for which
    there is one."""
    room, node = memory.usable(cluster.device), cluster.devices_per_node
    trainers = max(
        1, cluster.count - 1 if cluster.count <= node else (cluster.count - 1) // node * node
    )
    taken = memory.training(layouts.shape, trainers, tp=1).bytes_for(layouts.workload.longest)
    why = (
        f"lrl can run none of these plans today. With one response of {layouts.workload.longest:,} "
        f"tokens the policy takes {taken / GB:.0f} GB of each device that trains, sharded over "
        f"{trainers} of them, and {room / GB:.0f} of a device of {cluster} are free for it"
    )
    if taken <= room:
        return (
            f"{why}; there is no device left for generators that hold it. "
            f"{_nearest(layouts, cluster, max_lag)}"
        )
    largest = (layouts.shape.parameters - (taken - room) * trainers / memory.STATE_BYTES) / 1e9
    smaller = (
        f" A policy for {cluster} has at most about {largest:.2g} billion parameters."
        if largest > 0
        else ""
    )
    return f"{why}. {_nearest(layouts, cluster, max_lag)}{smaller}"


def _nearest(layouts: Layouts, cluster: Cluster, max_lag: int) -> str:
    """Names the known device with the least memory for which there is a plan."""
    for device in sorted(SHEETS, key=lambda sheet: sheet.memory):
        if device.memory <= cluster.device.memory:
            continue
        other = replace(cluster, device=device)
        if found := best(plans_today(layouts, other, max_lag), 1):
            return f"The nearest cluster that can is {other}, in {found[0].step_s:.3g} s a step."
    return "No known device has room for it."
