"""The plans for a cluster that lrl can run, and the best of them: a division of the devices, and a
layout for each side.

The search is StreamRL's Algorithm 1 (2504.15930, section on resource allocation) with the roofline
for its profiler: each side's best layout for each number of devices, and the division with the
fastest slower side. The seconds of a step with lag k are the largest of

    training + sync
    writing + sync
    (from a step's admission to the end of its longest response + last micro-batch + sync) / (k + 1)

The last is pacing's bound: a group admitted by version v is trained by the end of step v + k, which
is k + 1 steps later. On-policy (k = 0) nothing else is in flight: training takes groups as they
become complete, and the step ends after the last of them.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from lrl.planning.model_shape import ModelShape
from lrl.planning.roofline import (
    Cluster,
    Held,
    RooflineGenerator,
    RooflineTrainer,
    training_memory,
    usable,
)
from lrl.planning.workload import GenerationPhase, Workload, drained, slots_of, steady

MICRO_BATCHES = tuple(2**power for power in range(10, 18))
"""Tokens a rank may have in a micro-batch; larger ones only lengthen the step's last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A step's training."""

    costs: RooflineTrainer
    micro_batch_tokens: int
    """Of each rank (group of `costs.tp` devices)."""
    seconds: float
    """All micro-batches and the update."""
    last_s: float
    """The last micro-batch and the update, which cannot begin before the last response."""
    memory: float
    """Bytes of each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A step's generation."""

    generators: int
    costs: RooflineGenerator  # of one
    writing: GenerationPhase
    memory: float
    """Bytes of each device with all slots taken."""

    @property
    def devices(self) -> int:
        return self.generators * self.costs.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Devices, layouts and lag of a run, and the forecast of its step."""

    cluster: Cluster
    """The cluster, or one node of it."""
    training: Training
    generation: Generation
    lag: int
    """Most versions between writing and training."""
    sync_s: float
    step_s: float
    bound: str
    """The step's bottleneck: `training`, `writing`, or `longest response` (on-policy: all)."""

    @property
    def devices(self) -> int:
        return self.training.costs.devices + self.generation.devices

    @property
    def memory(self) -> float:
        """Bytes of the fullest device."""
        return max(self.training.memory, self.generation.memory)

    @property
    def trainer_apart(self) -> bool:
        """Whether the trainer has whole nodes, evenly, and the generators have others."""
        node, trainers = self.cluster.devices_per_node, self.training.costs.devices
        nodes = self.cluster.nodes_of(trainers) + self.cluster.nodes_of(self.generation.devices)
        even = trainers <= node or trainers % node == 0
        return even and nodes <= self.cluster.nodes_of(self.cluster.count)

    def idle(self, busy_s: float) -> float:
        """Returns the share of the step in which a side waits that is busy for these seconds: the
        trainer for groups, generators for pacing."""
        return max(0.0, 1 - (busy_s + self.sync_s) / self.step_s)


@dataclass(frozen=True)
class Search:
    """Plans for one model, workload and cluster."""

    shape: ModelShape
    workload: Workload
    cluster: Cluster
    held: Held = Held()

    def plans(self, max_lag: int) -> Iterator[Plan]:
        """Yields the plans on all devices of one node, and of all nodes."""
        node = min(self.cluster.count, self.cluster.devices_per_node)
        alone = replace(self, cluster=replace(self.cluster, count=node))
        yield from alone.divided(max_lag, sharded=False)
        yield from alone.divided(max_lag)
        if self.cluster.count > node:
            yield from self.divided(max_lag)

    def divided(self, max_lag: int, sharded: bool = True) -> Iterator[Plan]:
        """Yields a plan for each division of the devices and each lag: both sides on one node, on
        whole nodes each, or with as many devices of either on each node. The trainer's state is
        spread over all of its devices if `sharded`, else whole on each."""
        cluster, node = self.cluster, self.cluster.devices_per_node
        nodes = cluster.nodes_of(cluster.count)
        # Numbers of generator devices: each one within two nodes, whole nodes beyond.
        unit = 1 if nodes <= 2 else node
        for writers in range(unit, cluster.count, unit):
            trainers = cluster.count - writers
            training = self.training(trainers, trainers if sharded else 1)
            for lag in range(max_lag + 1) if training else ():
                generation = self.generation(writers, lag)
                if training and generation:
                    plan = self.plan(training, generation, lag)
                    evenly = trainers % nodes == generation.generators % nodes == 0
                    if evenly or plan.trainer_apart:
                        yield plan

    def plan(self, training: Training, generation: Generation, lag: int) -> Plan:
        """Returns the plan of two sides."""
        sync_s = max(training.costs.sync_s, generation.costs.sync_pause_s)
        writing, train_s = generation.writing, training.seconds
        if lag:
            tail_s = writing.span_s + training.last_s + sync_s
            bounds = {"writing": writing.busy_s + sync_s, "longest response": tail_s / (lag + 1)}
        else:
            fed_s = writing.trained_s(train_s, training.last_s)
            bounds = {"longest response": fed_s + sync_s}
        bounds["training"] = train_s + sync_s
        bound = max(bounds, key=bounds.__getitem__)
        return Plan(
            cluster=self.cluster,
            training=training,
            generation=generation,
            lag=lag,
            sync_s=sync_s,
            step_s=bounds[bound],
            bound=bound,
        )

    @cache  # noqa: B019 - it lives as long as the search
    def training(self, devices: int, shards: int) -> Training | None:
        found = self.trainings(devices, shards)
        return min(found, key=lambda one: one.seconds + one.last_s, default=None)

    def trainings(self, devices: int, shards: int) -> Iterator[Training]:
        """Yields the trainings that fit. The state is spread over `shards` devices: all, or one.
        With tensor parallelism there are two groups or more, and no experts."""
        work, shape = self.workload, self.shape
        divides = shards == devices and shape.experts == 1
        for tp in self.divisions(min(self.cluster.devices_per_node, devices // 2 * divides)):
            if tp > 1 and (devices % tp or shape.kv_heads % tp):
                continue
            costs = RooflineTrainer(
                shape=shape,
                cluster=self.cluster,
                devices=devices,
                tp=tp,
                shards=shards,
                held=self.held,
            )
            taken = training_memory(shape, shards, tp, self.held)
            room = taken.tokens_in(usable(self.cluster.device))
            for tokens in (size for size in MICRO_BATCHES if work.longest <= size <= room):
                count = math.ceil(work.tokens / (devices // tp * tokens))
                micro_s = costs.micro_batch_s(work.tokens / count, work.tokens_squared / count)
                yield Training(
                    costs=costs,
                    micro_batch_tokens=tokens,
                    seconds=count * micro_s + costs.update_s,
                    last_s=micro_s + costs.update_s,
                    memory=taken.bytes_for(tokens),
                )

    @cache  # noqa: B019 - it lives as long as the search
    def generation(self, devices: int, lag: int) -> Generation | None:
        def step_s(one: Generation) -> float:  # P_gen of Algorithm 1: the shortest it allows
            return max(one.writing.busy_s, one.writing.span_s / (lag + 1))

        return min(self.generations(devices, lag), key=step_s, default=None)

    def generations(self, devices: int, lag: int) -> Iterator[Generation]:
        """Yields the generations with this bound on lag."""
        work = self.workload
        for tp in self.divisions(min(self.cluster.devices_per_node, devices)):
            costs = RooflineGenerator(shape=self.shape, cluster=self.cluster, tp=tp)
            if not slots_of(costs, work):
                continue
            count = devices // tp
            writing = steady(costs, work, count, lag) if lag else drained(costs, work, count)
            memory = costs.memory.bytes_for(writing.slots * work.live_tokens)
            yield Generation(generators=count, costs=costs, writing=writing, memory=memory)

    def divisions(self, most: int) -> list[int]:
        """Returns 1 and the powers of two up to `most` that divide the model's heads."""
        powers = (2**power for power in range(1, most.bit_length()))
        return [1, *(size for size in powers if self.shape.heads % size == 0)]


def best(plans: Iterable[Plan], most: int) -> list[Plan]:
    """Returns the fastest `most` plans; within 1 % less lag comes first, then less memory. Of plans
    that differ only in layout, the first stands for all."""

    def order(plan: Plan) -> tuple[float, ...]:
        return round(math.log(plan.step_s), 2), plan.lag, plan.memory

    ranked: dict[tuple[int, ...], Plan] = {}
    for plan in sorted(plans, key=order):
        kind = plan.lag, plan.training.costs.devices, plan.generation.devices
        ranked.setdefault(kind, plan)
    return list(ranked.values())[:most]
