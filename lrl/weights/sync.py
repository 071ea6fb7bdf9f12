"""One sync, from the trainer's weights to generators that write on under them; the proof is behind it
(`GeneratorPool.verify`).

    stage -> pause -> start, update, finish -> resume

Each phase has a deadline, and names itself, the generator and the seconds when it fails. A pause and a version are also
asked for: a call that comes back is no proof, and weights must not change under a generator that writes. Until the
resume a failure harms nobody: the generator stands still, and the attempt is made again, at last by the transport's
second-best way. A resume that fails is told again; vLLM takes it as often as it comes. A generator that fails all
attempts, or that does not answer at all when it is told to pause or to resume, is given up by name.

Only the stage needs the policy. Where it copies the weights (`Transport.copies`) the rest can go on beside the next
step, on another thread (`deliver_with_retry`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lrl.generators.generator import Generator, KeysAndValues
from lrl.weights.control import CollectiveBroken, Control, Weights
from lrl.weights.transport import Transport

log = logging.getLogger(__name__)

RESUMES = 3
"""How often a generator is told to resume, before it is given up."""
Failures = dict[Generator, str]
"""Who failed, and at what."""
Resumed = Callable[[list[Generator]], Any]
"""Told after each attempt of those who write on since then, unproved."""


class Sync:
    """The syncs of one pool.

    Args:
        control: The way to its generators.
        make_transport: Makes what moves the weights.
        name: Of the connection, unique on this machine.
        entered: Told of each phase of `move`, which the trainer's time goes into (`lrl.runtime.stopwatch.SYNC`).
        keys_and_values: What a pause does with those of what is being written (`Generator.pause`).
    """

    def __init__(
        self,
        control: Control,
        make_transport: Callable[[], Transport],
        name: str,
        entered: Callable[[str], Any] = lambda phase: None,
        keys_and_values: KeysAndValues = "recompute",
    ) -> None:
        self.control = control
        self.make_transport = make_transport
        self.name = name
        self.entered = entered
        self.keys_and_values = keys_and_values
        self.recomputed_tokens = 0
        """Tokens that the generators had to read again because of a pause, since the first sync."""
        self.pause_seconds = 0.0
        """Seconds that the generators stood still in the last sync."""
        self._transport = make_transport()
        control.collective = self._transport.collective
        self._connected: set[Generator] = set()

    @property
    def copies(self) -> bool:
        """Whether the policy may change as soon as its weights are staged."""
        return self._transport.copies

    def move(self, weights: Weights, generators: Sequence[Generator], version: int, resumed: Resumed) -> Failures:
        """Give `generators` the weights, in as many attempts as the transport has ways.

        Args:
            weights: The policy's.
            generators: Who gets them; a collective transport needs all of the pool.
            version: What the weights are called.
            resumed: See `Resumed`.

        Returns:
            Who failed; they may hold anything and must be taken out.
        """
        given_up, first, todo = Failures(), Failures(), list(generators)
        self.pause_seconds = 0.0
        for number, use_fallback in enumerate(self._transport.attempts, 1):
            self.entered("stage")
            self._stage(weights, todo, version, use_fallback)
            self.entered("transfer")
            gone, late = self._deliver(resumed, number)
            given_up |= gone
            todo = [generator for generator in generators if generator in late]
            first = late | first  # what failed at first: later attempts may fail by what it left behind
            if not todo:
                break
        return given_up | {generator: first[generator] for generator in todo}

    def stage(self, weights: Weights, generators: Sequence[Generator], version: int) -> bool:
        """The first part of `move` by itself, for `deliver_with_retry`; whether nobody failed it."""
        self.pause_seconds = 0.0
        self._stage(weights, generators, version, use_fallback=False)
        self._say(1, self.control.failed)
        return not self.control.failed

    def deliver_with_retry(self, resumed: Resumed) -> tuple[Failures, Failures]:
        """The rest of `move` without the policy: two attempts with the copy that `stage` made.

        Returns:
            Who is given up; and who stands still, for whom `move` may be tried.
        """
        given_up, late = self._deliver(resumed, 1)
        if late:
            self.control.begin(list(late), self.control.version)
            gone, still = self._deliver(resumed, 2)
            given_up, late = given_up | gone, {generator: late[generator] for generator in still}
        return given_up, late

    def close(self) -> None:
        """Release the transport; idempotent."""
        self._transport.close()

    def _connect(self, weights: Weights, generators: Sequence[Generator], version: int) -> Failures:
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
        self._connected = {generator for generator in known if generator.eviction is None}
        return dict(self.control.failed)

    def _stage(self, weights: Weights, generators: Sequence[Generator], version: int, use_fallback: bool) -> None:
        """Do what can be done while the generators still write."""
        late = self._connect(weights, generators, version)
        self.control.begin([generator for generator in generators if generator not in late], version)
        self.control.failed |= late
        if self.control.taking_part:
            try:
                self._transport.stage(weights, use_fallback)
            except OSError as error:
                self.control.fail(f"staging the weights failed: {error}")

    def _deliver(self, resumed: Resumed, number: int) -> tuple[Failures, Failures]:
        """Bring the staged weights to who takes part, and let those who have them write on; given up, and late."""
        stood_from = time.monotonic()
        self._update()
        late, silent = dict(self.control.failed), self.control.silent
        given_up = {generator: late.pop(generator) for generator in silent}
        if self.control.taking_part:
            given_up |= self._resume(stood_from)
            resumed(self.control.taking_part)
        self._say(number, late)
        return given_up, late

    def _say(self, number: int, late: Failures) -> None:
        if late:
            log.warning("Sync to version %d, attempt %d: %s", self.control.version, number, "; ".join(late.values()))

    def _update(self) -> None:
        """Have who takes part stand still and take the weights."""
        if not self.control.taking_part:
            return
        self.control.each("/pause", self._pause, short=True)
        self._confirm("/is_paused", {"is_paused": True})
        self.control.close_update()
        try:
            self._transport.send(self.control)
        except CollectiveBroken as error:
            self.control.fail(str(error))
        self._confirm("/weight_info", {"weight_version": str(self.control.version)})

    async def _pause(self, generator: Generator) -> None:
        tokens = await generator.pause(self.keys_and_values, self.control.silence_s)
        self.recomputed_tokens += tokens

    def _confirm(self, route: str, expected: dict[str, Any]) -> None:
        def confirm(generator: Generator) -> Coroutine[Any, Any, None]:
            return generator.confirm(route, expected, self.control.silence_s)

        self.control.each(route, confirm, short=True)

    def _resume(self, stood_from: float) -> Failures:
        """Let who takes part write on; who fails. One that answers, but does not do it, is told again."""
        control, version, todo = self.control, self.control.version, self.control.taking_part
        resumed, failed = list[Generator](), Failures()
        for attempt in range(RESUMES):
            control.begin(todo, version)
            control.each("/resume", lambda generator: generator.resume(version, control.silence_s), short=True)
            if attempt == 0:
                self.pause_seconds += time.monotonic() - stood_from
            self._confirm("/is_paused", {"is_paused": False})
            resumed += control.taking_part
            failed = control.failed | failed  # what failed at first says most
            todo = [one for one in control.failed if one.eviction is None and one not in control.silent]
            if not todo:
                break
            self._say(attempt + 1, {generator: control.failed[generator] for generator in todo})
        control.taking_part = resumed
        return {generator: why for generator, why in failed.items() if generator not in resumed}
