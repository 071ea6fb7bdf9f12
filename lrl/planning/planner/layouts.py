"""The fastest layouts of training and of generation on a number of devices."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from lrl.planning.planner import memory
from lrl.planning.planner.batching import GenerationPhase, drained, slots_of, steady
from lrl.planning.planner.devices import Cluster
from lrl.planning.planner.model_shape import ModelShape
from lrl.planning.planner.roofline import RooflineGenerator, RooflineTrainer
from lrl.planning.planner.workload import Workload

MICRO_BATCHES = tuple(2**power for power in range(10, 18))
"""Tokens a rank may have in a micro-batch. Larger ones win nothing, and make the step's last one
longer."""


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

    @cache  # noqa: B019 - it lives as long as the search
    def training(
        self, cluster: Cluster, devices: int, shards: int | None = None
    ) -> Training | None:
        """Returns the fastest training on `devices` devices (see `trainings`); None if none
        fits."""
        found = self.trainings(cluster, devices, shards)
        return min(found, key=lambda one: one.seconds + one.last_s, default=None)

    def trainings(
        self, cluster: Cluster, devices: int, shards: int | None = None
    ) -> Iterator[Training]:
        """Yields all trainings on `devices` devices that fit a device's memory. The state is spread
        over `shards` of them, which also limits tensor parallelism; None for all."""
        work = self.workload
        for tp in self.divisions(
            min(self.trainer_tp or cluster.devices_per_node, shards or devices)
        ):
            used = devices // tp * tp
            if shards is not None and used % shards:
                continue
            spread = shards or used
            costs = RooflineTrainer(
                shape=self.shape, cluster=cluster, devices=used, tp=tp, shards=spread
            )
            taken = memory.training(self.shape, spread, tp)
            room = taken.tokens_in(memory.usable(cluster.device))
            for tokens in (size for size in MICRO_BATCHES if work.longest <= size <= room):
                count = math.ceil(work.tokens / (used // tp * tokens))
                micro_s = costs.micro_batch_s(work.tokens / count, work.tokens_squared / count)
                yield Training(
                    devices=devices,
                    costs=costs,
                    micro_batch_tokens=tokens,
                    seconds=count * micro_s + costs.update_s(),
                    last_s=micro_s + costs.update_s(),
                    memory=taken.bytes_for(tokens),
                )

    @cache  # noqa: B019 - it lives as long as the search
    def generation(self, cluster: Cluster, devices: int, lag: int) -> Generation | None:
        """Returns the fastest generation on `devices` devices with this bound on lag; None if none
        fits."""
        found = self.generations(cluster, devices, lag, memory.usable(cluster.device))
        return min(found, key=lambda one: one.writing.shortest_step_s(lag), default=None)

    def generations(
        self,
        cluster: Cluster,
        devices: int,
        lag: int,
        room: float,
        sizes: Sequence[int] | None = None,
    ) -> Iterator[Generation]:
        """Yields all generations on `devices` devices, with `room` bytes on each for weights, keys
        and values, and with generators of `sizes` devices; None for all powers of two that divide
        the heads."""
        for tp in self.divisions(devices) if sizes is None else sizes:
            for precision in self.precisions:
                if precision == "fp8" and not cluster.device.fp8_flops:
                    continue
                costs = RooflineGenerator(
                    shape=self.shape, cluster=cluster, tp=tp, precision=precision, room=room
                )
                if not slots_of(costs, self.workload):
                    continue
                count = devices // tp
                writing = (
                    steady(costs, self.workload, count, lag)
                    if lag
                    else drained(costs, self.workload, count)
                )
                bytes_taken = memory.generation(self.shape, tp, precision)
                yield Generation(
                    devices=devices,
                    generators=count,
                    costs=costs,
                    writing=writing,
                    memory=bytes_taken.bytes_for(writing.slots * self.workload.live_tokens),
                )

    def divisions(self, most: int) -> list[int]:
        """Returns the powers of two up to `most` that divide the model's heads."""
        powers = (2**power for power in range(most.bit_length()))
        return [size for size in powers if self.shape.heads % size == 0 and size <= most]
