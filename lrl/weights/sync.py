"""One sync, from the trainer's weights to generators that write on under them; the proof is behind it (`Crew.prove`).

    stage -> pause -> start, update, finish -> resume

Each phase has a deadline, and names itself, the generator and the seconds when it fails. A pause and a version are also
asked for: a call that comes back is no proof, and weights must not change under a generator that writes. Until the
resume a failure harms nobody: the generator stands still, and the attempt is made again, at last by the transport's
second-best way. A generator that fails all attempts, or that does not answer at all when it is told to pause, is given
up by name; it never writes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lrl.generators.generator import Generator
from lrl.weights.base import CollectiveBroken, Control, Transport, Weights

log = logging.getLogger(__name__)


class Sync:
    """The syncs of one crew.

    Args:
        control: The way to its generators.
        make_transport: Makes what moves the weights.
        name: Of the connection, unique on this machine.
        entered: Told of each phase that the trainer's time goes into (`lrl.stopwatch.SYNC`).
    """

    def __init__(
        self,
        control: Control,
        make_transport: Callable[[], Transport],
        name: str,
        entered: Callable[[str], Any] = lambda phase: None,
    ) -> None:
        self.control = control
        self.make_transport = make_transport
        self.name = name
        self.entered = entered
        self.pause_seconds = 0.0
        """Seconds that the generators stood still in the last sync."""
        self._stood_from = 0.0
        self._transport = make_transport()
        control.collective = self._transport.collective
        self._connected: set[Generator] = set()

    def move(
        self,
        weights: Weights,
        generators: Sequence[Generator],
        version: int,
        resumed: Callable[[list[Generator]], Any],
    ) -> dict[Generator, str]:
        """Give `generators` the weights.

        Args:
            weights: The policy's.
            generators: Who gets them; a collective transport needs all of the crew.
            version: What the weights are called.
            resumed: Told after each attempt of those who write on since then, unproved.

        Returns:
            Who failed, and why; they may hold anything and must be taken out.
        """
        self.pause_seconds = 0.0
        given_up, late, todo = dict[Generator, str](), dict[Generator, str](), list(generators)
        first: dict[Generator, str] = {}  # what failed at first: later attempts may fail by what it left behind
        for number, second_best in enumerate(self._transport.ways, 1):
            self.entered("stage")
            late = self._connect(weights, todo, version)
            self.control.begin([generator for generator in todo if generator not in late], version)
            if self.control.taking_part:
                self._deliver(weights, second_best, again=number > 1)
            late |= self.control.failed
            given_up |= {generator: late.pop(generator) for generator in self.control.silent}
            given_up |= self._release(version, resumed)
            if not late:
                return given_up
            todo = [generator for generator in generators if generator in late]
            first = late | first
            log.warning("Sync to version %d, attempt %d: %s", version, number, "; ".join(late.values()))
        return given_up | {generator: first[generator] for generator in late}

    def close(self) -> None:
        """Release the transport; idempotent."""
        self._transport.close()

    def _connect(self, weights: Weights, generators: Sequence[Generator], version: int) -> dict[Generator, str]:
        """Connect whoever is new; everybody when the transport is collective and somebody is new or has left."""
        new = [generator for generator in generators if generator not in self._connected]
        if self._transport.collective and self._connected != set(generators):
            self._transport.close()
            self._transport, self._connected, new = self.make_transport(), set(), list(generators)
        if not new:
            return {}
        self.control.begin(new, version)
        try:
            self._transport.connect(self.control, weights, self.name)
        except CollectiveBroken as error:
            self.control.fail(str(error))
        known = self._connected | set(self.control.taking_part)
        self._connected = {generator for generator in known if generator.out is None}
        return dict(self.control.failed)

    def _deliver(self, weights: Weights, second_best: bool, again: bool) -> None:
        """Bring the weights to generators that stand still."""
        try:
            self._transport.stage(weights, second_best)
        except OSError as error:
            self.control.fail(f"staging the weights failed: {error}")
            return
        self.entered("transfer")
        self._stood_from = time.monotonic()
        self.control.each("/pause", lambda generator: generator.pause(self.control.silence_s), short=True)
        self._confirm("/is_paused", {"is_paused": True})
        if again:
            self.control.close_update()
        try:
            self._transport.send(self.control)
        except CollectiveBroken as error:
            self.control.fail(str(error))
        self._confirm("/weight_info", {"weight_version": str(self.control.version)})

    def _confirm(self, route: str, expected: dict[str, Any]) -> None:
        def confirm(generator: Generator) -> Coroutine[Any, Any, None]:
            return generator.confirm(route, expected, self.control.silence_s)

        self.control.each(route, confirm, short=True)

    def _release(self, version: int, resumed: Callable[[list[Generator]], Any]) -> dict[Generator, str]:
        """Let those who have the weights write on; who fails."""
        if not self.control.taking_part:
            return {}
        self.control.begin(self.control.taking_part, version)
        self.control.each("/resume", lambda generator: generator.resume(version, self.control.silence_s))
        self.pause_seconds += time.monotonic() - self._stood_from
        resumed(self.control.taking_part)
        return dict(self.control.failed)
