"""What a weight transport is: the trainer's end of a sync. vLLM's engine of the same name is the other end.

A transport moves tensors and nothing else. When to pause, what the version is called and whether it worked are decided
by `callbacks/weight_sync.py`, which is the same for all transports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lrl.generators.crew import Crew
from lrl.generators.loop import LoopThread

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Yields the policy's weights afresh at every call: Hugging Face names, full tensors."""


class Control:
    """The control plane of a sync: the four calls of vLLM's weight-transfer protocol, to a whole crew at once.

    Has the methods of vLLM's `VLLMWeightSyncClient`, so vLLM's own trainer engines can drive it. They keep hold of it,
    and ask for no version: the caller sets `version` before each sync.

    Args:
        crew: Who is synced.
        loop: What carries the calls.
        deadline_s: Seconds for each call.
    """

    def __init__(self, crew: Crew, loop: LoopThread, deadline_s: float) -> None:
        self.crew = crew
        self.loop = loop
        self.deadline_s = deadline_s
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare the engines. With NCCL every worker of every generator needs a rank of its own."""
        bodies = []
        for number, generator in enumerate(self.crew.generators):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += number * generator.server.settings.tensor_parallel_size
            bodies.append({"init_info": info})
        self._post("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """Open the update."""
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Have the workers take the weights `update_info` describes."""
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update: from here on tokens carry the new version."""
        self._post("/finish_weight_update", {"weight_version": weight_version or str(self.version)})

    def _post(self, route: str, body: Any = None) -> None:
        work = self.crew.post(route, body, self.deadline_s)
        self.loop.wait(work, self.deadline_s + 5.0, f"{route} for weight version {self.version}")


class Transport(ABC):
    """One way for weights to reach the generators; subclasses name vLLM's engine in `backend`."""

    backend: str

    @abstractmethod
    def connect(self, control: Control, weights: Weights, name: str) -> None:
        """Join the generators' engines; called once, before the first sync. `name` is unique on this machine."""

    def stage(self, weights: Weights) -> None:  # noqa: B027 - most transports have nothing to do ahead
        """Do what can be done while the generators still write; called right before the pause."""

    @abstractmethod
    def send(self, control: Control) -> None:
        """Move the weights: start, update, finish. The generators are paused."""

    def close(self) -> None:  # noqa: B027
        """Release what `connect` took; idempotent."""
