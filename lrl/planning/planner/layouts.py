"""The best way to train a step's samples on a number of devices, and the best way to write them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from lrl.planning.planner import memory
from lrl.planning.planner.batching import GenerationPhase, drained, slots_of, steady
from lrl.planning.planner.devices import Cluster
from lrl.planning.planner.model_shape import ModelShape
from lrl.planning.planner.roofline import Constants, RooflineGenerator, RooflineTrainer
from lrl.planning.planner.workload import Workload

MICRO_BATCHES = tuple(2**power for power in range(10, 18))
"""Tokens a rank may have in a micro-batch. Larger ones win nothing, and make the step's last one longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A step's training."""

    devices: int
    tp: int
    shards: int
    """Devices over which one copy of the weights, the gradient and the optimizer's state is spread."""
    micro_batch_tokens: int
    """Tokens that each rank (group of `tp` devices) has in a micro-batch."""
    seconds: float
    """All micro-batches and the update."""
    last_s: float
    """The last micro-batch and the update: what cannot begin before the last response is there."""
    sync_s: float
    memory: float
    """Bytes of each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A step's generation."""

    devices: int
    generators: int
    tp: int
    precision: str
    writing: GenerationPhase
    pause_s: float
    memory: float
    """Bytes of each device with all slots taken."""


@dataclass(frozen=True)
class Sides:
    """What both sides are chosen for."""

    shape: ModelShape
    workload: Workload
    precisions: tuple[str, ...] = ("bf16",)
    constants: Constants = Constants()

    @cache  # noqa: B019 - it lives as long as the search
    def training(self, cluster: Cluster, devices: int, shards: int | None = None) -> Training | None:
        """The fastest way to train on `devices` devices (see `trainings`); None if none fits."""
        ways = list(self.trainings(cluster, devices, shards))
        return min(ways, key=lambda way: way.seconds + way.last_s) if ways else None

    def trainings(self, cluster: Cluster, devices: int, shards: int | None = None) -> Iterator[Training]:
        """All ways to train on `devices` devices that fit a device's memory.

        Args:
            cluster: Where they are.
            devices: How many.
            shards: Over how many the state is spread, which is then also how many tensor parallelism takes at most;
                all of them if not given.
        """
        for tp in self.divisions(min(cluster.devices_per_node, shards or devices)):
            used = devices // tp * tp
            if shards is not None and used % shards:
                continue
            costs = RooflineTrainer(
                shape=self.shape, cluster=cluster, devices=used, tp=tp, shards=shards, constants=self.constants
            )
            taken = memory.training(self.shape, shards or used, tp)
            room = taken.tokens_in(memory.usable(cluster.device))
            for tokens in MICRO_BATCHES:
                if self.workload.longest <= tokens <= room:
                    yield self._training(costs, devices, tokens, taken.bytes_for(tokens))

    def _training(self, costs: RooflineTrainer, devices: int, tokens: int, taken: float) -> Training:
        ranks = costs.devices // costs.tp
        count = math.ceil(self.workload.tokens / (ranks * tokens))
        micro_s = costs.micro_batch_s(self.workload.tokens / count, self.workload.tokens_squared / count)
        update_s = costs.update_s()
        return Training(
            devices=devices,
            tp=costs.tp,
            shards=costs.shards or costs.devices,
            micro_batch_tokens=tokens,
            seconds=count * micro_s + update_s,
            last_s=micro_s + update_s,
            sync_s=costs.sync_s(),
            memory=taken,
        )

    @cache  # noqa: B019 - it lives as long as the search
    def generation(self, cluster: Cluster, devices: int, lag: int) -> Generation | None:
        """The fastest way to write on `devices` devices with this bound on lag; None if none fits."""
        ways = list(self.generations(cluster, devices, lag, memory.usable(cluster.device)))
        return min(ways, key=lambda way: max(way.writing.busy_s, way.writing.span_s / (lag + 1))) if ways else None

    def generations(
        self, cluster: Cluster, devices: int, lag: int, room: float, sizes: Sequence[int] | None = None
    ) -> Iterator[Generation]:
        """All ways to write on `devices` devices with `room` bytes on each; only `sizes` of generators if given."""
        for tp in self.divisions(devices) if sizes is None else sizes:
            for precision in self.precisions:
                if precision == "fp8" and not cluster.device.fp8_flops:
                    continue
                costs = RooflineGenerator(
                    shape=self.shape,
                    cluster=cluster,
                    tp=tp,
                    precision=precision,
                    room=room,
                    constants=self.constants,
                )
                if slots_of(costs, self.workload):
                    yield self._generation(costs, devices, lag)

    def _generation(self, costs: RooflineGenerator, devices: int, lag: int) -> Generation:
        generators = devices // costs.tp
        writing = steady(costs, self.workload, generators, lag) if lag else drained(costs, self.workload, generators)
        taken = memory.generation(self.shape, costs.tp, costs.precision)
        return Generation(
            devices=devices,
            generators=generators,
            tp=costs.tp,
            precision=costs.precision,
            writing=writing,
            pause_s=costs.sync_pause_s(),
            memory=taken.bytes_for(writing.slots * self.workload.live_tokens),
        )

    def divisions(self, most: int) -> list[int]:
        """Powers of two up to `most` by which the model's heads can be cut."""
        powers = (2**power for power in range(most.bit_length()))
        return [size for size in powers if self.shape.heads % size == 0 and size <= most]
