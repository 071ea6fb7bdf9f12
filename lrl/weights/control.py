"""The control plane of a sync: vLLM's routes, called on all generators of a pool at once."""

import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from torch import Tensor

from lrl.generators.client import GeneratorTimeout
from lrl.generators.generator import Generator, gather
from lrl.runtime.event_loop import LoopThread

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Yields the policy's weights afresh at every call: Hugging Face names, full tensors."""


class CollectiveBroken(RuntimeError):
    """A collective transfer failed for one generator, so no generator has the weights."""


class Control:
    """Sends each phase of a sync to all generators at once, and leaves those that fail out of the next phase.

    It has the methods of vLLM's `VLLMWeightSyncClient`, so vLLM's own trainer engines can drive it. They keep a
    reference to it and pass no version: `begin` sets the version before each sync. The four calls of that client raise
    CollectiveBroken if one generator fails and the transfer needs them all.

    Args:
        loop: The event loop that carries the calls.
        deadline_s: Seconds for each phase.
        silence_s: Seconds for a call that takes milliseconds when nothing is wrong; at most `deadline_s`.
        interrupted: Called while waiting; it raises to end the wait.
        collective: Whether the transfer needs every generator, so that one failure fails all.
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
        """Generators that have not failed so far, in their order."""
        self.failed: dict[Generator, str] = {}
        """Generators that have failed, with the reason."""
        self.opened: set[Generator] = set()
        """Generators in which an update may be open: it was started, and no finish was confirmed."""
        self.silent: set[Generator] = set()
        """Failed generators that let the deadline of a short call pass: their event loop stands still."""

    def begin(self, generators: Sequence[Generator], version: int) -> None:
        """Directs the next calls to `generators`."""
        self.version, self.taking_part, self.failed, self.silent = version, list(generators), {}, set()

    def each(self, phase: str, work: Callable[[Generator], Coroutine[Any, Any, Any]], short: bool = False) -> None:
        """Runs one phase for all that take part, at once; the calls of a `short` one have `silence_s`."""
        started, asked = time.monotonic(), [generator for generator in self.taking_part if generator.eviction is None]
        self.failed |= {
            generator: generator.eviction for generator in self.taking_part if generator.eviction is not None
        }
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
        """Marks all generators that still take part as failed."""
        self.failed |= dict.fromkeys(self.taking_part, why)
        self.taking_part = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepares the engines. With NCCL every worker of every generator needs its own rank."""

        def body(generator: Generator) -> dict[str, Any]:
            info = dict(init_info)
            if "rank_offset" in info:
                place = self.taking_part.index(generator)
                info["rank_offset"] += place * generator.server.settings.tensor_parallel_size
            return {"init_info": info}

        self._post("/init_weight_transfer_engine", body)

    def start_weight_update(self) -> None:
        """Opens the update."""
        self.opened |= set(self.taking_part)
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Makes the workers load the weights that `update_info` describes."""
        self._post("/update_weights", lambda generator: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Closes the update: from then on tokens carry the new version."""
        body = {"weight_version": weight_version or str(self.version)}
        self._post("/finish_weight_update", lambda generator: body)
        self.opened -= set(self.taking_part)

    def close_update(self) -> None:
        """Closes an update that a failed attempt may have left open: vLLM refuses a second start until then.

        If the start never arrived, the engine answers with an error, which is ignored. The next update overwrites
        whatever this one loaded, and no generator is ever confirmed under the version `abandoned`.
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
