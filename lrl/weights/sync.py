"""The syncs of one pool, one after another, each with its verification.

    stage -> distribute -> pause -> start, update, finish -> resume -> finish_sync -> verify

`move` does all of it up to the resume while the trainer waits; `start` only the stage, which alone
needs the policy, and the rest on a thread beside the next step (for transports that copy the
weights). The trainer never waits for the verification: unverified tokens stay in their generator. A
generator that the distribution does not reach is paused with the others, because nothing may begin
under its older version once they hold the new one.

Each phase has a deadline and names itself, the generator and the seconds when it fails. A pause and
a version are also read back, because an answered call is no proof of its effect, and weights must
not change under a generator that writes. Before the resume a failure does no harm: the generator is
paused, and the sync is attempted again, at last by the transport's fallback. A generator that fails
all attempts is evicted; so is one that lets the deadline of a pause or resume pass, since its event
loop stands still. A collective transfer fails for all when it fails for one: that one is evicted at
once, and the next attempt connects the others without it.
"""

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from typing import Any

from lrl.errors import CollectiveBroken
from lrl.generators.generator import CONTROL_DEADLINE_S, Generator, KeysAndValues
from lrl.generators.pool import GeneratorPool, Probe
from lrl.weights.control import Control
from lrl.weights.transport import Transport
from lrl.weights.wire import Weights

log = logging.getLogger(__name__)

RESUMES = 3
"""Attempts at a resume; vLLM accepts it any number of times."""
PHASES = 20
"""More than the phases of a sync that wait, each with its own deadline."""
ENDS_S = 10.0
"""Seconds for a sync beside the step to notice the end of the run; it looks every fifth of a
second."""
Failures = dict[Generator, str]
"""Failed generators, with the reason."""
Resumed = Callable[[list[Generator]], Any]
"""Called after each attempt with the generators that write again, unverified."""


class RunEnded(Exception):  # noqa: N818 - the run's end is no error
    """A sync was interrupted because its run ends."""


class PoolSync:
    """Runs the weight syncs of one pool.

    Args:
        pool: The generators that are synced together.
        control: The control plane to them.
        make_transport: Makes the trainer's end of the transfer.
        name: Of the connection, unique on this machine.
        interrupted: Called by the trainer's thread while it waits; raises to end the wait.
        entered: Called with each phase of `move` that costs the trainer's time
            (`lrl.system.stopwatch.SYNC`).
        keys_and_values: What a pause does with those of the responses in flight
            (`Generator.pause`).
    """

    def __init__(
        self,
        pool: GeneratorPool,
        control: Control,
        make_transport: Callable[[], Transport],
        name: str,
        interrupted: Callable[[], None] = lambda: None,
        entered: Callable[[str], Any] = lambda phase: None,
        keys_and_values: KeysAndValues = "recompute",
    ) -> None:
        self.pool = pool
        self.control = control
        self.make_transport = make_transport
        self.name = name
        self.interrupted = interrupted
        self.entered = entered
        self.keys_and_values = keys_and_values
        self.recomputed_tokens = 0
        """Tokens that the generators had to read again because of pauses, since the first sync."""
        self.pause_seconds = 0.0
        """Seconds without writing in the last sync."""
        self._transport = make_transport()
        control.collective = self._transport.collective
        self._connected: set[Generator] = set()
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="lrl-sync")
        self._delivery: futures.Future[Failures] | None = None
        self._verifications: list[futures.Future[Failures]] = []
        self._missed = False
        """Whether the last sync, beside a step, missed a generator: only `move` makes all
        attempts."""
        self._ends = False

    # ---- for the trainer

    def move(self, weights: Weights, version: int, make_probe: Callable[[], Probe]) -> Failures:
        """Gives the weights to all generators of the pool that do not hold them; returns those to
        evict."""
        self._missed = False
        if not (stale := self._admit_pending(version)):
            return {}
        self.control.interrupted = self.interrupted
        return self.give(weights, stale, version, self._verify(make_probe()))

    def start(
        self,
        weights: Weights,
        version: int,
        make_probe: Callable[[], Probe],
        moved: Callable[[], Any],
    ) -> bool:
        """Stages the weights, and does the rest on a thread.

        Args:
            weights: The policy's; it may be changed afterwards.
            version: Their version.
            make_probe: Called at once.
            moved: Called on the thread when no generator writes under the version before any
                longer.

        Returns:
            Whether that is possible; otherwise nothing was done that `move` would not do.
        """
        if (
            self._missed
            or not self._transport.copies
            or not (stale := self._admit_pending(version))
        ):
            return False
        probe = make_probe()
        self.control.interrupted = self.interrupted
        self.pause_seconds = 0.0
        self._stage(weights, stale, version, use_fallback=False)
        self._log_failures(1, self.control.failed)
        if self.control.failed:
            return False
        if not self._transport.fetches:  # while they fetch, they take requests: it may be minutes
            self._call(self.pool.drain(stale), "draining generators")
        self.control.interrupted = self._raise_if_ended
        self._delivery = self._thread.submit(self._deliver_beside, probe, moved)
        return True

    @property
    def fetched_bytes(self) -> int:
        """See `Transport.fetched_bytes`."""
        return self._transport.fetched_bytes

    @property
    def sent_bytes(self) -> int:
        """See `Transport.sent_bytes`."""
        return self._transport.sent_bytes

    @property
    def has_stale(self) -> bool:
        """Whether a sync beside the step left a paused generator: a new sync is needed."""
        if self._delivery is None or not self._delivery.done():
            return False
        return self._delivery.exception() is not None or bool(self._delivery.result())

    def wait(self) -> Failures:
        """Waits until all that the pool writes is verified or cut; returns the probes' failures
        since the last wait."""
        if self._delivery is not None:
            limit = PHASES * (self.control.deadline_s + 5.0)
            late = self.control.loop.wait_for(
                self._delivery, limit, "a sync beside the step", self.interrupted
            )
            self._delivery = None
            self._missed = bool(late)
        failed, verifications, self._verifications = Failures(), self._verifications, []
        for one in verifications:
            deadline_s = self.control.deadline_s + 5.0
            found = self.control.loop.wait_for(
                one, deadline_s, "the verification of a sync", self.interrupted
            )
            failed.update(found)
        return failed

    def finish_sync(self, failed: Failures) -> None:
        """Ends a sync and evicts the generators that failed it."""
        self._call(self.pool.finish_sync(failed), "evicting failed generators")

    def end(self) -> None:
        """Ends with the run: interrupts a sync under way and cuts what is unverified."""
        self._ends = True
        if self._delivery is not None:
            futures.wait([self._delivery], ENDS_S)
            error = self._delivery.exception() if self._delivery.done() else None
            # A signal is a SystemExit.
            if isinstance(error, Exception) and not isinstance(error, RunEnded):
                log.warning("The last sync failed: %s", error)
        for one in self._verifications:
            one.cancel()
        self._delivery = None
        self._verifications = []
        self._call(
            self.pool.drop_unverified("The run ended before it was proved."),
            "cutting unverified tokens",
        )

    def close(self) -> None:
        """Releases the transport; idempotent."""
        self._ends = True
        self._thread.shutdown(wait=False)
        self._transport.close()

    # ---- a sync

    def give(
        self, weights: Weights, generators: Sequence[Generator], version: int, resumed: Resumed
    ) -> Failures:
        """Gives the weights to `generators`, in as many attempts as the transport has.

        Args:
            weights: The policy's.
            generators: The receivers; a collective transport needs the whole pool.
            version: The version of the weights.
            resumed: See `Resumed`.

        Returns:
            The generators that failed; their weights are unknown, and they must be evicted.
        """
        given_up, first, todo = Failures(), Failures(), list(generators)
        self.pause_seconds = 0.0
        for number, use_fallback in enumerate(self._transport.attempts, 1):
            self.entered("stage")
            self._stage(weights, todo, version, use_fallback)
            unreached = self._distribute()
            self.entered("transfer")
            gone, late = self._deliver(unreached, resumed, number)
            given_up |= gone
            todo = [generator for generator in generators if generator in late]
            first = late | first  # the first failure says most: later ones may follow from it
            if not todo:
                break
        return given_up | {generator: first[generator] for generator in todo}

    def _deliver_beside(self, probe: Probe, moved: Callable[[], Any]) -> Failures:
        """Delivers the staged copy in two attempts, without the policy; returns the generators that
        stay paused."""
        resumed = self._verify(probe)
        given_up, late = self._deliver(self._distribute(), resumed, 1)
        if late:
            self.control.begin(list(late), self.control.version)
            gone, still = self._deliver(self._distribute(), resumed, 2)
            given_up, late = given_up | gone, {generator: late[generator] for generator in still}
        self.finish_sync(given_up)
        moved()
        return late

    def _admit_pending(self, version: int) -> list[Generator]:
        """Admits pending generators; returns those that need the weights."""
        self._call(self.pool.admit_pending(), "admitting generators")
        members = self.pool.generators
        stale = [
            generator
            for generator in members
            if generator.version != version or not generator.serving
        ]
        return list(members) if stale and self.control.collective else stale

    def _connect(self, weights: Weights, generators: Sequence[Generator], version: int) -> None:
        """Connects new generators; all of them if the transport is collective and the pool has
        changed."""
        self.control.begin([], version)
        new = [generator for generator in generators if generator not in self._connected]
        if self._transport.collective and self._connected != set(generators):
            self._transport.close()
            self._transport, self._connected, new = self.make_transport(), set(), list(generators)
        if not new:
            return
        self.control.begin(new, version)
        try:
            self._transport.connect(self.control, weights, self.name)
        except CollectiveBroken as error:
            self.control.fail(str(error))
        known = self._connected | set(self.control.taking_part)
        self._connected = {generator for generator in known if generator.eviction is None}

    def _stage(
        self, weights: Weights, generators: Sequence[Generator], version: int, use_fallback: bool
    ) -> None:
        """Does what can be done while the generators still write."""
        self._connect(weights, generators, version)
        late, sound = self.control.failed, self.control.sound
        self.control.begin(
            [generator for generator in generators if generator not in late], version
        )
        self.control.failed = late
        self.control.sound = sound
        if self.control.taking_part:
            try:
                self._transport.stage(weights, use_fallback)
            except OSError as error:
                self.control.fail(f"staging the weights failed: {error}")

    def _distribute(self) -> Failures:
        """Brings the staged weights to the generators while they still write; returns those that it
        did not reach."""
        control, failed = self.control, dict(self.control.failed)
        if not control.taking_part:
            return {}
        asked = list(control.taking_part)
        self._transport.distribute(control)
        unreached = {
            one: why
            for one, why in control.failed.items()
            if one not in failed and one.eviction is None
        }
        control.taking_part = [
            one for one in asked if one in control.taking_part or one in unreached
        ]
        for generator in unreached:
            del control.failed[generator]
        return unreached

    def _deliver(
        self, unreached: Failures, resumed: Resumed, number: int
    ) -> tuple[Failures, Failures]:
        """Moves the staged weights into the generators and resumes them; returns those to evict and
        those to retry.

        Those that are `unreached` are only paused, and retried.
        """
        paused_from = time.monotonic()
        self._update(unreached)
        late, control = dict(self.control.failed), self.control
        to_blame = late.keys() - control.sound if control.collective else control.silent
        given_up = {generator: late.pop(generator) for generator in to_blame}
        if self.control.taking_part:
            given_up |= self._resume(paused_from)
            resumed(self.control.taking_part)
        self._log_failures(number, late)
        return given_up, late

    def _update(self, unreached: Failures) -> None:
        """Pauses the generators and replaces the weights of all but those that are `unreached`."""
        if not self.control.taking_part:
            return
        self.control.each("/pause", self._pause, short=True)
        self._confirm("/is_paused", {"is_paused": True})
        self.control.drop(unreached)
        if not self.control.taking_part:
            return
        self.control.close_update()
        try:
            self._transport.send(self.control)
        except CollectiveBroken as error:
            self._connected.clear()
            self.control.fail(str(error))
        self._confirm("/weight_info", {"weight_version": str(self.control.version)})

    async def _pause(self, generator: Generator) -> None:
        tokens = await generator.pause(self.keys_and_values, self.control.silence_s)
        self.recomputed_tokens += tokens

    def _confirm(self, route: str, expected: dict[str, Any]) -> None:
        def confirm(generator: Generator) -> Coroutine[Any, Any, None]:
            return generator.confirm(route, expected, self.control.silence_s)

        self.control.each(route, confirm, short=True)

    def _resume(self, paused_from: float) -> Failures:
        """Resumes the generators and returns those that failed; one that answers without effect is
        asked again."""
        control, version, todo = self.control, self.control.version, self.control.taking_part
        resumed, failed = list[Generator](), Failures()
        for attempt in range(RESUMES):
            control.begin(todo, version)
            control.each(
                "/resume",
                lambda generator: generator.resume(version, control.silence_s),
                short=True,
            )
            if attempt == 0:
                self.pause_seconds += time.monotonic() - paused_from
            self._confirm("/is_paused", {"is_paused": False})
            resumed += control.taking_part
            failed = control.failed | failed  # the first failure says most
            todo = [
                one for one in control.failed if one.eviction is None and one not in control.silent
            ]
            if not todo:
                break
            self._log_failures(
                attempt + 1, {generator: control.failed[generator] for generator in todo}
            )
        control.taking_part = resumed
        return {generator: why for generator, why in failed.items() if generator not in resumed}

    def _log_failures(self, number: int, late: Failures) -> None:
        if late:
            log.warning(
                "Sync to version %d, attempt %d: %s",
                self.control.version,
                number,
                "; ".join(late.values()),
            )

    def _verify(self, probe: Probe) -> Resumed:
        loop, pool = self.control.loop, self.pool
        return lambda resumed: self._verifications.append(loop.submit(pool.verify(resumed, probe)))

    def _raise_if_ended(self) -> None:
        if self._ends:
            raise RunEnded

    def _call(self, work: Any, what: str) -> Any:
        return self.control.loop.wait(work, CONTROL_DEADLINE_S, what, lambda: None)
