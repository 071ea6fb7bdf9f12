"""Which plans today's lrl can run, and what is nearest where it can run none.

`lrl.AsyncSingleDevice` and `lrl.AsyncDDP` have the whole policy, its gradient and the optimizer's state on each device
that trains, in one node, and move weights in bfloat16. Sharded trainers and several nodes are forecasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lrl.planning.planner import memory
from lrl.planning.planner.devices import GB, SHEETS, Cluster
from lrl.planning.planner.layouts import Sides
from lrl.planning.planner.search import Plan, asynchronous, best, synchronous


def runs_today(plan: Plan, cluster: Cluster) -> bool:
    """Whether lrl can run the plan.

    A shared plan of one device counts, though there both sides then work at the same time instead of in turn.
    """
    whole = plan.training.shards == 1 and plan.generation.precision == "bf16"
    apart = plan.placement == "split" or plan.devices == 1
    return whole and apart and plan.devices <= cluster.devices_per_node


def one_node(cluster: Cluster) -> Cluster:
    """As much of a cluster as one run of today's can use."""
    return replace(cluster, count=min(cluster.count, cluster.devices_per_node))


def plans_today(sides: Sides, cluster: Cluster, max_lag: int) -> Iterator[Plan]:
    """All plans that lrl can run on one node of a cluster."""
    node, plain = one_node(cluster), replace(sides, precisions=("bf16",))
    yield from asynchronous(plain, node, max_lag, shards=1)
    if node.count == 1:
        yield from synchronous(plain, node)


def why_none(sides: Sides, cluster: Cluster, max_lag: int) -> str:
    """Why there is no such plan, and the nearest cluster and size of policy for which there is one."""
    room = memory.usable(cluster.device)
    taken = memory.training(sides.shape, shards=1, tp=1).bytes_for(sides.workload.longest)
    why = (
        "lrl can run none of these plans today: every device that trains has the whole policy, its gradient and its "
        f"optimizer. With one response of {sides.workload.longest:,} tokens that takes {taken / GB:.0f} GB, and "
        f"{room / GB:.0f} of a device of {cluster} are free for it"
    )
    if taken <= room:
        return f"{why}; there is no device left for generators that hold it. {_nearest(sides, cluster, max_lag)}"
    largest = (sides.shape.parameters - (taken - room) / memory.STATE_BYTES) / 1e9
    smaller = f" A policy for {cluster} has at most about {largest:.2g} billion parameters." if largest > 0 else ""
    return f"{why}. {_nearest(sides, cluster, max_lag)}{smaller}"


def _nearest(sides: Sides, cluster: Cluster, max_lag: int) -> str:
    """The known device with the least memory on which there is a plan."""
    larger = sorted((sheet for sheet in SHEETS if sheet.memory > cluster.device.memory), key=lambda sheet: sheet.memory)
    for device in larger:
        other = one_node(replace(cluster, device=device))
        if found := best(plans_today(sides, other, max_lag), 1):
            return f"The nearest cluster that can is {other}, in {found[0].step_s:.3g} s a step."
    return "No known device has room for it."
