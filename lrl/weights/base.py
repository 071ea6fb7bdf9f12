"""What a weight transport is: the trainer's end of a sync. vLLM's engine of the same name is the other end.

A transport moves tensors and nothing else. When to pause, what the version is called and whether it worked are decided
by `callbacks/weight_sync.py`, which is the same for all transports.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from torch import Tensor

from lrl.generators.client import GeneratorTimeout
from lrl.generators.generator import Generator, gather
from lrl.runtime.event_loop import LoopThread

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Yields the policy's weights afresh at every call: Hugging Face names, full tensors."""


class CollectiveBroken(RuntimeError):
    """One generator failed in a transfer that all take part in at once, so nobody has the weights."""


class Control:
    """The control plane of a sync: a phase goes to all generators at once, and who fails it is left out of the next.

    Has the methods of vLLM's `VLLMWeightSyncClient`, so vLLM's own trainer engines can drive it. They keep hold of it,
    and ask for no version: `begin` sets it before each sync. The four calls raise CollectiveBroken if one generator
    fails and the transfer needs them all.

    Args:
        loop: What carries the calls.
        deadline_s: Seconds for each phase.
        silence_s: Seconds for a call that takes milliseconds when nothing is wrong; at most `deadline_s`.
        interrupted: Called while waiting; it raises to end the wait.
        collective: Whether the transfer needs every generator, so that one failure is everybody's.
    """

    def __init__(
        self,
        loop: LoopThread,
        deadline_s: float,
        silence_s: float,
        interrupted: Callable[[], None] | None = None,
        collective: bool = False,
    ) -> None:
        self.loop = loop
        self.deadline_s = deadline_s
        self.silence_s = min(silence_s, deadline_s)
        self.interrupted = interrupted
        self.collective = collective
        self.version = 0
        self.taking_part: list[Generator] = []
        """Who has not failed so far, in their order."""
        self.failed: dict[Generator, str] = {}
        """Who has, and at what."""
        self.opened: set[Generator] = set()
        """Where an update may be open: it was started, and not finished as far as is known."""
        self.silent: set[Generator] = set()
        """Who of these let the deadline of a short call pass: it stands still, and would not hear a second one."""

    def begin(self, generators: Sequence[Generator], version: int) -> None:
        """From here on, the calls go to `generators`."""
        self.version, self.taking_part, self.failed, self.silent = version, list(generators), {}, set()

    def each(self, phase: str, work: Callable[[Generator], Coroutine[Any, Any, Any]], short: bool = False) -> None:
        """Run one phase for all that take part, at once; `short` if its calls are given `silence_s`."""
        started, asked = time.monotonic(), [generator for generator in self.taking_part if generator.out is None]
        self.failed |= {generator: generator.out for generator in self.taking_part if generator.out is not None}
        what = f"{phase} for weight version {self.version}"
        works = gather([work(generator) for generator in asked])
        errors = self.loop.wait(works, self.deadline_s + 5.0, what, self.interrupted)
        for generator, error in zip(asked, errors, strict=True):
            if error is not None:
                self.failed[generator] = f"{what} failed after {time.monotonic() - started:.1f} s: {error}"
                if short and isinstance(error, GeneratorTimeout):
                    self.silent.add(generator)
        self.taking_part = [generator for generator in asked if generator not in self.failed]

    def fail(self, why: str) -> None:
        """Note that all who still take part have failed."""
        self.failed |= dict.fromkeys(self.taking_part, why)
        self.taking_part = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare the engines. With NCCL every worker of every generator needs a rank of its own."""

        def body(generator: Generator) -> dict[str, Any]:
            info = dict(init_info)
            if "rank_offset" in info:
                place = self.taking_part.index(generator)
                info["rank_offset"] += place * generator.server.settings.tensor_parallel_size
            return {"init_info": info}

        self._post("/init_weight_transfer_engine", body)

    def start_weight_update(self) -> None:
        """Open the update."""
        self.opened |= set(self.taking_part)
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Have the workers take the weights `update_info` describes."""
        self._post("/update_weights", lambda generator: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the update: from here on tokens carry the new version."""
        body = {"weight_version": weight_version or str(self.version)}
        self._post("/finish_weight_update", lambda generator: body)
        self.opened -= set(self.taking_part)

    def close_update(self) -> None:
        """Close the update that a failed attempt may have left open: an engine opens no other meanwhile.

        Where the start was not heard none is open, and the engine answers with an error, which says nothing. What the
        update left of the weights is overwritten by the next one, and a version of this name is never confirmed.
        """
        route, body = "/finish_weight_update", {"weight_version": "abandoned"}
        open_at = [generator for generator in self.taking_part if generator in self.opened]
        if not open_at:
            return
        works = [generator.client.post(route, body, deadline_s=self.silence_s) for generator in open_at]
        self.loop.wait(gather(works), self.silence_s + 5.0, "closing an update that failed", self.interrupted)
        self.opened -= set(open_at)

    def _post(self, route: str, body: Callable[[Generator], dict[str, Any] | None] = lambda generator: None) -> None:
        self.each(route, lambda generator: generator.client.post(route, body(generator), deadline_s=self.deadline_s))
        if self.failed and self.collective:
            raise CollectiveBroken(f"{route} failed for another generator, and all take part in one transfer.")


class Transport(ABC):
    """One way for weights to reach the generators; subclasses name vLLM's engine in `backend`."""

    backend: str
    collective = False
    """Whether all generators take part in one transfer; then a new one means that all connect anew."""
    copies = False
    """Whether `stage` copies the weights, so that the policy may change while they are sent."""
    attempts: tuple[bool, ...] = (False, False)
    """The attempts at a sync: for each, whether it goes by the transport's second-best way."""

    @abstractmethod
    def connect(self, control: Control, weights: Weights, name: str) -> None:
        """Join the engines of the generators that take part; called before the first sync of each. `name` is unique on
        this machine."""

    def stage(self, weights: Weights, use_fallback: bool) -> None:  # noqa: B027 - most have nothing to do ahead
        """Do what can be done while the generators still write; called right before the pause.

        Raises:
            OSError: There is no room for the weights on this way.
        """

    @abstractmethod
    def send(self, control: Control) -> None:
        """Move the weights: start, update, finish. The generators are paused."""

    def close(self) -> None:  # noqa: B027
        """Release what `connect` took; idempotent."""
