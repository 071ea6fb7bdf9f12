"""The slots at which generators fetch one version: a tree that grows while they fetch.

The trainer has `FAN_OUT` slots, and so has every generator that has fetched the version. A
generator waits for a free slot and gives it back. So rank 0 sends to two at once however many
there are, no generator is the parent of another before it has the version, and a slow or frozen one
holds one slot and nobody else. Generators on the trainer's machine have no part in it: no link
lies between, so they fetch from the trainer at once, and other machines do not reach them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from lrl.generators.generator import Generator
from lrl.system.endpoint import is_loopback

FAN_OUT = 2
"""With a full link one slot would be best: n generators have the version after log2(n + 1)
transfers, and with two slots after 1.26 times that. But one alone would stand still for one slow
generator, and one connection rarely fills a link."""


class UploadSlots:
    """The slots of one version; lives on the fleet's loop.

    Args:
        stall_s: Seconds without any slot given back, before the trainer opens one more. They do not
            count from a generator's own request: in a large tree most wait longer than that while
            all goes well, and 968 of 1,000 went to the trainer at once (simulated).
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._free: list[Generator | None] = [None] * FAN_OUT
        """None is the trainer."""
        self._changed = asyncio.Condition()
        self._moved_s = -1.0
        """Time of the loop at which the last slot was given back or opened; negative before the
        first request."""

    @asynccontextmanager
    async def take(self, child: Generator) -> AsyncIterator[Generator | None]:
        """Takes a slot for `child` and gives it back; it is at the trainer if there is none at
        another generator."""
        if is_here(child):
            yield None
            return
        source = await self._wait(child)
        try:
            yield source
        finally:
            await self._add([source])

    async def open_at(self, generator: Generator) -> None:
        """Opens the slots of a generator that has the version."""
        if not is_here(generator):
            await self._add([generator] * FAN_OUT)

    async def _add(self, slots: Sequence[Generator | None]) -> None:
        async with self._changed:
            self._open(slots)

    def _open(self, slots: Sequence[Generator | None]) -> None:
        self._free += slots
        self._moved_s = asyncio.get_running_loop().time()
        self._changed.notify_all()

    async def _wait(self, child: Generator) -> Generator | None:
        loop = asyncio.get_running_loop()
        async with self._changed:
            if self._moved_s < 0:
                self._moved_s = loop.time()
            while not (open_ones := self._open_ones()):
                stalled_at = self._moved_s + self._stall_s
                if loop.time() >= stalled_at:
                    self._open([None])
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(stalled_at):
                        await self._changed.wait()
            self._free.remove(open_ones[0])
            return open_ones[0]

    def _open_ones(self) -> list[Generator | None]:
        """Returns the free slots, the generators' slots first, which spare rank 0's link."""
        peers = [one for one in self._free if one is not None and one.eviction is None]
        return [*peers, *(one for one in self._free if one is None)]


def is_here(generator: Generator) -> bool:
    """Whether the trainer reaches a generator on loopback, which only its own machine does."""
    return is_loopback(urlsplit(generator.client.url).hostname or "")
