"""Plans for a cluster and the best of them: a division of the devices, and a layout for each side.

The asynchronous search is StreamRL's Algorithm 1 (2504.15930, section on resource allocation) with
the roofline for its profiler: each side's best layout for each number of devices, and the division
with the fastest slower side. The seconds of a step with lag k are the largest of

    training + sync
    writing + sync
    (responses of a step / as many as pacing lets be in flight) * (tools + writing of one) + sync
    (from a step's admission to the end of its longest response + last micro-batch + sync) / (k + 1)

The last is pacing's bound: a group admitted by version v is trained by the end of step v + k, which
is k + 1 steps later. The one before counts only for episodes: those that wait for tools write
nothing. On-policy (k = 0) nothing else is in flight: training takes groups as they become complete,
and the step ends after the last of them. A synchronous plan takes turns on all devices, with both
sides in memory.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from lrl.planning.model_shape import BYTES, ModelShape
from lrl.planning.roofline import (
    GB,
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

    devices: int
    costs: RooflineTrainer
    micro_batch_tokens: int
    """Tokens that each rank (group of `costs.tp` devices) has in a micro-batch."""
    seconds: float
    """All micro-batches and the update."""
    last_s: float
    """The last micro-batch and the update, which cannot begin before the last response."""
    memory: float
    """Bytes of each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A step's generation."""

    devices: int
    generators: int
    costs: RooflineGenerator
    """Costs of one generator."""
    writing: GenerationPhase
    memory: float
    """Bytes of each device with all slots taken."""


@dataclass(frozen=True)
class Layouts:
    """Layouts for one model and workload."""

    shape: ModelShape
    workload: Workload
    precisions: tuple[str, ...] = ("bf16",)
    """Of the generators."""
    trainer_tp: int | None = None
    """Most devices of a trainer rank; None for a node's."""
    held: Held = Held()

    @cache  # noqa: B019 - it lives as long as the search
    def training(
        self, cluster: Cluster, devices: int, shards: int | None = None
    ) -> Training | None:
        found = self.trainings(cluster, devices, shards)
        return min(found, key=lambda one: one.seconds + one.last_s, default=None)

    def trainings(
        self, cluster: Cluster, devices: int, shards: int | None = None
    ) -> Iterator[Training]:
        """Yields all trainings on `devices` devices that fit. The state is spread over `shards` of
        them, which also limits tensor parallelism; None for all."""
        work = self.workload
        most_tp = min(self.trainer_tp or cluster.devices_per_node, shards or devices)
        for tp in self.divisions(most_tp):
            used = devices // tp * tp
            spread = shards or used
            costs = RooflineTrainer(
                shape=self.shape,
                cluster=cluster,
                devices=used,
                tp=tp,
                shards=spread,
                held=self.held,
            )
            taken = training_memory(self.shape, spread, tp, self.held)
            room = taken.tokens_in(usable(cluster.device))
            for tokens in (size for size in MICRO_BATCHES if work.longest <= size <= room):
                count = math.ceil(work.tokens / (used // tp * tokens))
                micro_s = costs.micro_batch_s(work.tokens / count, work.tokens_squared / count)
                yield Training(
                    devices=devices,
                    costs=costs,
                    micro_batch_tokens=tokens,
                    seconds=count * micro_s + costs.update_s,
                    last_s=micro_s + costs.update_s,
                    memory=taken.bytes_for(tokens),
                )

    @cache  # noqa: B019 - it lives as long as the search
    def generation(self, cluster: Cluster, devices: int, lag: int) -> Generation | None:
        found = self.generations(cluster, devices, lag, usable(cluster.device))
        return min(found, key=lambda one: one.writing.shortest_step_s(lag), default=None)

    def generations(
        self, cluster: Cluster, devices: int, lag: int, room: float
    ) -> Iterator[Generation]:
        """Yields all generations on `devices` devices with this bound on lag, and `room` bytes on
        each for weights, keys and values."""
        for tp in self.divisions(devices):
            for precision in self.precisions:
                if precision == "fp8" and not cluster.device.fp8_flops:
                    continue
                costs = RooflineGenerator(
                    shape=self.shape, cluster=cluster, tp=tp, precision=precision, room=room
                )
                if not slots_of(costs, self.workload):
                    continue
                count = devices // tp
                work = self.workload
                writing = steady(costs, work, count, lag) if lag else drained(costs, work, count)
                memory = costs.memory.bytes_for(writing.slots * work.live_tokens)
                yield Generation(
                    devices=devices, generators=count, costs=costs, writing=writing, memory=memory
                )

    def divisions(self, most: int) -> list[int]:
        """Returns the powers of two up to `most` that divide the model's heads."""
        powers = (2**power for power in range(most.bit_length()))
        return [size for size in powers if self.shape.heads % size == 0 and size <= most]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Devices, layouts and lag of a run, and the forecast of its step."""

    placement: Literal["split", "shared"]
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
        shared = self.placement == "shared"
        return self.training.devices if shared else self.training.devices + self.generation.devices

    @property
    def memory(self) -> float:
        """Bytes of the fullest device."""
        both = self.training.memory, self.generation.memory
        return sum(both) if self.placement == "shared" else max(both)

    def idle(self, busy_s: float) -> float:
        """Returns the share of the step in which a side waits that is busy for these seconds: the
        trainer for groups; generators for pacing, or while all their episodes wait for tools."""
        return max(0.0, 1 - (busy_s + self.sync_s) / self.step_s)


def split(training: Training, generation: Generation, lag: int, between: float = 0.0) -> Plan:
    """Returns the plan of two sides on separate devices; a version's weights take `between` seconds
    from one cluster to another (0 within one)."""
    sync_s = max(training.costs.sync_s, generation.costs.sync_pause_s, between)
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
    """Yields a plan for each division of the cluster and each lag (Algorithm 1, one datacentre); a
    side may leave devices idle. The trainer's state is spread over `shards` devices, or all of its."""
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
    as needed of the other; None if one does not fit. One copy of the weights goes over the link
    (bytes/s)."""
    between = BYTES["bf16"] * layouts.shape.parameters / link
    training = layouts.training(trainers, trainers.count)
    generation = layouts.generation(writers, writers.count, lag)
    if training is None or generation is None:
        return None
    train_s = training.seconds
    write_s = generation.writing.shortest_step_s(lag)
    if write_s < train_s:
        counts = range(1, writers.count + 1)
        written = filter(None, (layouts.generation(writers, count, lag) for count in counts))
        generation = min(written, key=lambda one: abs(one.writing.shortest_step_s(lag) - train_s))
    else:
        counts = range(1, trainers.count + 1)
        trained = filter(None, (layouts.training(trainers, count) for count in counts))
        training = min(trained, key=lambda one: abs(one.seconds - write_s))
    return split(training, generation, lag, between)


def synchronous(layouts: Layouts, cluster: Cluster) -> Iterator[Plan]:
    """Yields plans that train and write in turn on all devices, on-policy, with both sides in
    memory: keys and values get what training leaves."""
    for training in layouts.trainings(cluster, cluster.count):
        room = usable(cluster.device) - training.memory
        for generation in layouts.generations(cluster, cluster.count, lag=0, room=room):
            sync_s = generation.costs.sync_pause_s
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
    """Returns the fastest `most` plans; within 1 % less lag comes first, then less memory. Of plans
    that differ only in layout, the first stands for all. If all are of one placement, the best of
    the other takes the last place, for comparison."""

    def order(plan: Plan) -> tuple[float, ...]:
        return round(math.log(plan.step_s), 2), plan.lag, plan.memory

    ranked: dict[tuple[object, ...], Plan] = {}
    for plan in sorted(plans, key=order):
        kind = plan.placement, plan.lag, plan.generation.costs.precision, plan.training.devices
        ranked.setdefault(kind, plan)
    chosen = list(ranked.values())[:most]
    others = [plan for plan in ranked.values() if plan.placement != chosen[0].placement]
    if others and others[0] not in chosen and most > 1:
        chosen[-1] = others[0]
    return chosen


def runs_today(plan: Plan, cluster: Cluster) -> bool:
    """Returns whether lrl can run the plan: generators in bfloat16, and both sides on one node, on
    whole nodes each, or with as many devices of either on each node."""
    generation, node = plan.generation.costs, cluster.devices_per_node
    plain = generation.precision == "bf16" and generation.tp <= node and _divides(plan.training)
    if plan.placement == "shared":
        return plain and plan.devices == 1
    nodes = cluster.nodes_of(plan.devices)
    equal = plan.training.devices % nodes == 0 and plan.generation.generators % nodes == 0
    several = on_nodes_of_its_own(plan, cluster) or equal and plan.devices <= cluster.count
    return plain and (plan.devices <= node or several)


def _divides(training: Training) -> bool:
    """Returns whether lrl has the trainer's tensor parallelism: without experts, by a divisor of the
    heads, in two or more groups."""
    costs, shape = training.costs, training.costs.shape
    whole_heads = shape.heads % costs.tp == shape.kv_heads % costs.tp == 0
    return costs.tp == 1 or (
        shape.experts == 1 and whole_heads and 2 * costs.tp <= training.devices == costs.shards
    )


def on_nodes_of_its_own(plan: Plan, cluster: Cluster) -> bool:
    """Returns whether the trainer has whole nodes, evenly, and the generators have others."""
    node, trainers = cluster.devices_per_node, plan.training.devices
    nodes = cluster.nodes_of(trainers) + cluster.nodes_of(plan.generation.devices)
    return (trainers <= node or trainers % node == 0) and nodes <= cluster.nodes_of(cluster.count)


def plans_today(layouts: Layouts, cluster: Cluster, max_lag: int) -> Iterator[Plan]:
    """Yields all plans that lrl can run on one node of a cluster, and on several; with the whole
    state on each trainer device on one node only."""
    node = replace(cluster, count=min(cluster.count, cluster.devices_per_node))
    plain = replace(layouts, precisions=("bf16",), trainer_tp=1)
    if node.count == 1:
        yield from synchronous(plain, node)
    yield from asynchronous(plain, node, max_lag, shards=1)
    for where in {node.count: node, cluster.count: cluster}.values():
        for trainer_tp in (1, None):
            divided = replace(plain, trainer_tp=trainer_tp)
            plans = asynchronous(divided, where, max_lag)
            yield from (plan for plan in plans if runs_today(plan, cluster))


def today_first(today: list[Plan], later: list[Plan], most: int) -> list[Plan]:
    """Returns the best `most` plans: first those that lrl can run, then others, two of five."""
    able, others = (best(plans, most) if plans else [] for plans in (today, later))
    kept = max(most - len(others), most - 2 * most // 5)
    return (able[:kept] + others)[:most]


def memory_needed(layouts: Layouts, cluster: Cluster) -> str:
    """Explains why there is no plan: what training takes, spread over all devices but one."""
    trainers = max(1, cluster.count - 1)
    longest = layouts.workload.longest
    memory = training_memory(layouts.shape, trainers, tp=1, held=layouts.held)
    taken = memory.bytes_for(longest)
    return (
        f"with one response of {longest:,} tokens, training takes {taken / GB:.0f} GB of each of "
        f"{trainers} devices, of which plans may fill {usable(cluster.device) / GB:.0f}, and "
        "generators need room beside it. Take more devices, larger ones, or a smaller model."
    )
