"""Plans for a cluster and the best of them: a division of the devices, and a layout for each side.

Device counts are whole, responses have lengths, and moving weights takes time: LlamaRL's problems
(`llamarl_bounds.py`) leave these out. The asynchronous search is StreamRL's Algorithm 1
(2504.15930, section on resource allocation) with the roofline for its profiler: each side's best
layout for each number of devices, and the division with the fastest slower side. The seconds of a
step with lag k are the largest of

    training + sync
    writing + sync
    (responses of a step / as many as pacing lets be in flight) * (tools + writing of one) + sync
    (from a step's admission to the end of its longest response + last micro-batch + sync) / (k + 1)

The last is pacing's bound: a group admitted by version v is trained by the end of step v + k, which
is k + 1 steps later. The one before counts only for episodes: those that wait for tools write
nothing. On-policy (k = 0) nothing else is in flight: training takes groups as they
become complete (stream generation), and the step ends after the last of them. A synchronous plan
takes turns on all devices, with both sides in memory.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lrl.planning.planner import memory
from lrl.planning.planner.devices import Cluster
from lrl.planning.planner.layouts import Generation, Layouts, Training
from lrl.planning.planner.model_shape import BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Devices, layouts and lag of a run, and the forecast of its step."""

    placement: str
    """`split`: each side has its own devices; `shared`: both use all devices, in turn."""
    training: Training
    generation: Generation
    lag: int
    """Most versions between writing and training."""
    sync_s: float
    step_s: float
    bound: str
    """The step's bottleneck: `training`, `writing`, `tools`, `longest response` (on-policy: all
    responses) or `in turn`."""

    @property
    def devices(self) -> int:
        """Devices of the plan."""
        shared = self.placement == "shared"
        return self.training.devices if shared else self.training.devices + self.generation.devices

    @property
    def memory(self) -> float:
        """Bytes of the fullest device."""
        both = self.training.memory, self.generation.memory
        return sum(both) if self.placement == "shared" else max(both)

    @property
    def trainer_waits(self) -> float:
        """Share of the step in which the trainer has nothing to train."""
        return max(0.0, 1 - (self.training.seconds + self.sync_s) / self.step_s)

    @property
    def generators_wait(self) -> float:
        """Share of the step in which pacing stops the generators until the trainer catches up, or
        in which all their episodes wait for tools."""
        return max(0.0, 1 - (self.generation.writing.busy_s + self.sync_s) / self.step_s)


def split(training: Training, generation: Generation, lag: int, between: float = 0.0) -> Plan:
    """Returns the plan of two sides on separate devices, with `between` seconds to move a version's
    weights from one cluster to another (0 within one)."""
    sync_s = max(training.costs.sync_s(), generation.costs.sync_pause_s(), between)
    writing = generation.writing
    if lag:
        tail = writing.span_s + training.last_s + sync_s
        bounds = {
            "writing": writing.busy_s + sync_s,
            "tools": writing.flow_s + sync_s,
            "longest response": tail / (lag + 1),
        }
    else:
        bounds = {"longest response": writing.trained_s(training.seconds, training.last_s) + sync_s}
    bounds["training"] = training.seconds + sync_s
    bound = max(bounds, key=bounds.__getitem__)
    return Plan(
        placement="split",
        training=training,
        generation=generation,
        lag=lag,
        sync_s=sync_s,
        step_s=bounds[bound],
        bound=bound,
    )


def asynchronous(
    layouts: Layouts, cluster: Cluster, max_lag: int, shards: int | None = None
) -> Iterator[Plan]:
    """Yields a plan for each division of the cluster and each lag up to `max_lag` (Algorithm 1, one
    datacentre).

    A side may leave devices idle, so divisions of fewer devices need not be tried. The trainer's
    state is spread over `shards` devices; None for all of the trainer's.
    """
    # Numbers of generator devices: each one within two nodes, whole nodes beyond.
    unit = 1 if cluster.count <= 2 * cluster.devices_per_node else cluster.devices_per_node
    for writers in range(unit, cluster.count, unit):
        training = layouts.training(cluster, cluster.count - writers, shards)
        for lag in range(max_lag + 1) if training else ():
            generation = layouts.generation(cluster, writers, lag)
            if training and generation:
                yield split(training, generation, lag)


def across(
    layouts: Layouts, trainers: Cluster, writers: Cluster, lag: int, link: float
) -> Plan | None:
    """Returns StreamRL's Algorithm 1 for two datacentres: all devices of the slower side, as many
    as needed of the other; None if one side does not fit its cluster. One copy of the weights goes
    over the link (bytes/s) and spreads on the other side."""
    between = BYTES["bf16"] * layouts.shape.parameters / link
    training = layouts.training(trainers, trainers.count)
    generation = layouts.generation(writers, writers.count, lag)
    if training is None or generation is None:
        return None
    train_s = training.seconds
    write_s = generation.writing.shortest_step_s(lag)
    if write_s < train_s:
        written = filter(
            None, (layouts.generation(writers, k, lag) for k in range(1, writers.count + 1))
        )
        generation = min(written, key=lambda one: abs(one.writing.shortest_step_s(lag) - train_s))
    else:
        trained = filter(
            None, (layouts.training(trainers, k) for k in range(1, trainers.count + 1))
        )
        training = min(trained, key=lambda one: abs(one.seconds - write_s))
    return split(training, generation, lag, between)


def synchronous(layouts: Layouts, cluster: Cluster, shards: int | None = None) -> Iterator[Plan]:
    """Yields plans that train and write in turn on all devices, on-policy, with both sides in
    memory.

    With `shards`, each side spreads its model over so many devices (LlamaRL's synchronous problem:
    one m for both). Without, the trainer's state is spread over all devices, generators have their
    own size, and weights are laid out anew between the two. Keys and values get the memory that
    training leaves.
    """
    for training in layouts.trainings(cluster, cluster.count, shards):
        room = memory.usable(cluster.device) - training.memory
        sizes = None if shards is None else [shards]
        for generation in layouts.generations(
            cluster, cluster.count, lag=0, room=room, sizes=sizes
        ):
            sync_s = 0.0 if shards else generation.costs.sync_pause_s()
            yield Plan(
                placement="shared",
                training=training,
                generation=generation,
                lag=0,
                sync_s=sync_s,
                step_s=generation.writing.span_s + training.seconds + sync_s,
                bound="in turn",
            )


def best(plans: Iterable[Plan], most: int) -> list[Plan]:
    """Returns the fastest `most` plans; of plans within 1 % of each other first less lag, then less
    memory.

    Of plans that differ only in layout, the first stands for all. If all are of one placement, the
    best of the other takes the last place, for comparison.
    """
    ranked: dict[tuple[object, ...], Plan] = {}
    for plan in sorted(
        plans, key=lambda plan: (round(math.log(plan.step_s), 2), plan.lag, plan.memory)
    ):
        kind = plan.placement, plan.lag, plan.generation.costs.precision, plan.training.devices
        ranked.setdefault(kind, plan)
    chosen = list(ranked.values())[:most]
    others = [plan for plan in ranked.values() if plan.placement != chosen[0].placement]
    if others and others[0] not in chosen and most > 1:
        chosen[-1] = others[0]
    return chosen
