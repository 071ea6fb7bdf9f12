"""Plans for a cluster, and the best of them: how devices are divided, what each side does with its own, who waits.

Device counts are whole, responses have lengths, and weights take time to travel: what LlamaRL's problems
(`problems.py`) leave out. The asynchronous search is StreamRL's Algorithm 1 (2504.15930, section on resource
allocation) with the roofline for its profiler: each side's best layout for each number of devices, and the division
whose slower side is fastest. The seconds of a step with lag k are the largest of

    training + sync
    writing + sync
    (from a step's admission to the end of its longest response + last micro-batch + sync) / (k + 1)

The last is pacing's bound: what is admitted by version v is trained by the end of step v + k, that is k + 1 steps
later. On-policy (k = 0) nothing else is in flight: training takes groups as they become whole (stream generation), and
the step ends when it has had them all. A synchronous plan takes turns on all devices, with both sides in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lrl.planning.planner import memory
from lrl.planning.planner.devices import Cluster
from lrl.planning.planner.layouts import Generation, Sides, Training
from lrl.planning.planner.model_shape import BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to run steps, and what it is expected to take."""

    placement: str
    """`split`: each side has devices of its own; `shared`: both use all devices, in turn."""
    training: Training
    generation: Generation
    lag: int
    """Most versions between writing and training."""
    sync_s: float
    step_s: float
    bound: str
    """What the step's time is: `training`, `writing`, `longest response` (on-policy: all responses) or `in turn`."""

    @property
    def devices(self) -> int:
        """Devices of the plan."""
        shared = self.placement == "shared"
        return self.training.devices if shared else self.training.devices + self.generation.devices

    @property
    def memory(self) -> float:
        """Bytes of the fullest device."""
        sides = self.training.memory, self.generation.memory
        return sum(sides) if self.placement == "shared" else max(sides)

    @property
    def trainer_waits(self) -> float:
        """Share of the step in which the trainer has nothing to train."""
        return max(0.0, 1 - (self.training.seconds + self.sync_s) / self.step_s)

    @property
    def generators_wait(self) -> float:
        """Share of the step in which the generators may not write on: the trainer has to catch up first."""
        return max(0.0, 1 - (self.generation.writing.busy_s + self.sync_s) / self.step_s)

    @property
    def sync_share(self) -> float:
        """Share of the step that goes into the sync."""
        return self.sync_s / self.step_s


def split(training: Training, generation: Generation, lag: int, between: float = 0.0) -> Plan:
    """The plan of two sides on devices of their own.

    Args:
        training: The trainer's side.
        generation: The generators' side.
        lag: Most versions between writing and training; the generation was planned for it.
        between: Seconds a version's weights take from one cluster to another; 0 within one.
    """
    sync_s = max(training.sync_s, generation.pause_s, between)
    writing = generation.writing
    if lag:
        tail = writing.span_s + training.last_s + sync_s
        bounds = {"writing": writing.busy_s + sync_s, "longest answer": tail / (lag + 1)}
    else:
        bounds = {"longest answer": writing.trained_s(training.seconds, training.last_s) + sync_s}
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


def asynchronous(sides: Sides, cluster: Cluster, max_lag: int, shards: int | None = None) -> Iterator[Plan]:
    """A plan for each division of the cluster and each lag up to `max_lag`: StreamRL's Algorithm 1, one datacentre.

    A side leaves devices idle that it cannot use, so divisions that leave out devices need not be tried.

    Args:
        sides: What is trained and written.
        cluster: Where.
        max_lag: Largest lag that is tried.
        shards: Over how many devices the trainer's state is spread; over all of its devices if not given.
    """
    for writers in divisions(cluster):
        training = sides.training(cluster, cluster.count - writers, shards)
        for lag in range(max_lag + 1) if training else ():
            generation = sides.generation(cluster, writers, lag)
            if training and generation:
                yield split(training, generation, lag)


def across(sides: Sides, trainers: Cluster, writers: Cluster, lag: int, link: float) -> Plan | None:
    """StreamRL's Algorithm 1 for two datacentres: the slower side uses all it has, the other no more than it needs.

    Args:
        sides: What is trained and written.
        trainers: Where training runs.
        writers: Where generators run.
        lag: Most versions between writing and training.
        link: Bytes/s between the two; one copy of the weights goes over it and spreads on the other side.

    Returns:
        The plan; None if one side does not fit its cluster.
    """
    between = BYTES["bf16"] * sides.shape.parameters / link
    training = sides.training(trainers, trainers.count)
    generation = sides.generation(writers, writers.count, lag)
    if training is None or generation is None:
        return None
    train_s, write_s = training.seconds, _needs(generation, lag)
    if write_s < train_s:
        writing = [sides.generation(writers, k, lag) for k in range(1, writers.count + 1)]
        generation = min((one for one in writing if one), key=lambda one: abs(_needs(one, lag) - train_s))
    else:
        trained = [sides.training(trainers, k) for k in range(1, trainers.count + 1)]
        training = min((one for one in trained if one), key=lambda one: abs(one.seconds - write_s))
    return split(training, generation, lag, between)


def _needs(generation: Generation, lag: int) -> float:
    """P_gen: the shortest step that this side allows."""
    return max(generation.writing.busy_s, generation.writing.span_s / (lag + 1))


def synchronous(sides: Sides, cluster: Cluster, shards: int | None = None) -> Iterator[Plan]:
    """Plans that train and write in turn on all devices, on-policy, with both sides in memory.

    Args:
        sides: What is trained and written.
        cluster: Where.
        shards: If given, both sides spread their model over just so many devices (LlamaRL's synchronous problem: one m
            for both). If not, the trainer's state is spread over all devices, generators have a size of their own, and
            weights are laid out anew between the two. What training leaves is for keys and values: that is the
            division of the shared memory.
    """
    for training in sides.trainings(cluster, cluster.count, shards):
        room = memory.usable(cluster.device) - training.memory
        sizes = None if shards is None else [shards]
        for generation in sides.generations(cluster, cluster.count, 0, room, sizes):
            sync_s = 0.0 if shards else generation.pause_s
            yield Plan(
                placement="shared",
                training=training,
                generation=generation,
                lag=0,
                sync_s=sync_s,
                step_s=generation.writing.span_s + training.seconds + sync_s,
                bound="in turn",
            )


def divisions(cluster: Cluster) -> range:
    """Numbers of devices to keep back for generators: each one within two nodes, whole nodes beyond."""
    unit = 1 if cluster.count <= 2 * cluster.devices_per_node else cluster.devices_per_node
    return range(unit, cluster.count, unit)


def best(plans: Iterable[Plan], most: int) -> list[Plan]:
    """The fastest `most` plans; of plans within 1 % of each other the one with less lag first, then less memory.

    Plans that differ only in layout are one, the first of them. If all are of one placement, the best of the other
    takes the last place, for comparison.
    """
    ranked: dict[tuple[object, ...], Plan] = {}
    for plan in sorted(plans, key=lambda plan: (round(math.log(plan.step_s), 2), plan.lag, plan.memory)):
        kind = plan.placement, plan.lag, plan.generation.precision, plan.training.devices
        ranked.setdefault(kind, plan)
    chosen = list(ranked.values())[:most]
    others = [plan for plan in ranked.values() if plan.placement != chosen[0].placement]
    if others and others[0] not in chosen and most > 1:
        chosen[-1] = others[0]
    return chosen
