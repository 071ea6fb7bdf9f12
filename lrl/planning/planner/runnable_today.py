"""Plans that lrl can run today, and the nearest cluster with one.

`lrl.AsyncSingleDevice` and `lrl.AsyncDDP` keep the whole policy, its gradient and the optimizer's state on each trainer
device, `lrl.AsyncFSDP` a share. All of them train in one node, without tensor parallelism, and move weights in
bfloat16. Several nodes are forecasts.
"""

from collections.abc import Iterator
from dataclasses import replace

from lrl.planning.planner import memory
from lrl.planning.planner.devices import GB, SHEETS, Cluster
from lrl.planning.planner.layouts import Layouts
from lrl.planning.planner.search import Plan, asynchronous, best, synchronous


def runs_today(plan: Plan, cluster: Cluster) -> bool:
    """Returns whether lrl can run the plan. A shared plan of one device counts, though its sides then run concurrently
    and not in turn."""
    plain = plan.training.costs.tp == 1 and plan.generation.costs.precision == "bf16"
    apart = plan.placement == "split" or plan.devices == 1
    return plain and apart and plan.devices <= cluster.devices_per_node


def plans_today(layouts: Layouts, cluster: Cluster, max_lag: int) -> Iterator[Plan]:
    """Yields all plans that lrl can run on one node of a cluster."""
    node = replace(cluster, count=min(cluster.count, cluster.devices_per_node))
    plain = replace(layouts, precisions=("bf16",), trainer_tp=1)
    yield from asynchronous(plain, node, max_lag, shards=1)
    yield from (plan for plan in asynchronous(plain, node, max_lag) if plan.training.devices > 1)
    if node.count == 1:
        yield from synchronous(plain, node)


def why_none(layouts: Layouts, cluster: Cluster, max_lag: int) -> str:
    """Explains why there is no such plan, with the nearest cluster and size of policy for which there is one."""
    room = memory.usable(cluster.device)
    trainers = max(1, min(cluster.count, cluster.devices_per_node) - 1)
    taken = memory.training(layouts.shape, trainers, tp=1).bytes_for(layouts.workload.longest)
    why = (
        "lrl can run none of these plans today: it works on one node, without tensor parallelism in the trainer. With "
        f"one response of {layouts.workload.longest:,} tokens the policy takes {taken / GB:.0f} GB of each device that "
        f"trains, sharded over {trainers} of them, and {room / GB:.0f} of a device of {cluster} are free for it"
    )
    if taken <= room:
        return f"{why}; there is no device left for generators that hold it. {_nearest(layouts, cluster, max_lag)}"
    largest = (layouts.shape.parameters - (taken - room) * trainers / memory.STATE_BYTES) / 1e9
    smaller = f" A policy for {cluster} has at most about {largest:.2g} billion parameters." if largest > 0 else ""
    return f"{why}. {_nearest(layouts, cluster, max_lag)}{smaller}"


def _nearest(layouts: Layouts, cluster: Cluster, max_lag: int) -> str:
    """Names the known device with the least memory for which there is a plan."""
    for device in sorted(SHEETS, key=lambda sheet: sheet.memory):
        if device.memory <= cluster.device.memory:
            continue
        other = replace(cluster, device=device, count=min(cluster.count, cluster.devices_per_node))
        if found := best(plans_today(layouts, other, max_lag), 1):
            return f"The nearest cluster that can is {other}, in {found[0].step_s:.3g} s a step."
    return "No known device has room for it."
