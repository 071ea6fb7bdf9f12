"""The syncs of one pool, one after another.

    stage -> distribute -> pause -> load -> resume

Half-written responses continue under the new weights; every token carries its version. A sync
beside the step (`in_background`) only stages while the trainer waits, which alone needs the policy,
and does the rest on a thread; for that the transport must copy the weights. After the resume those
generators are proved that are due (`lrl.weights.proof`): a new one before it serves, any other
beside its writing. Only a run's first sync waits for its proofs; the next sync waits for those of
any other. A generator that the distribution does not reach is paused with the others, because
nothing may begin under its older version once they hold the new one.

Each phase has a deadline and names itself, the generator and the seconds when it fails. A pause and
a version are read back: an answered call does not prove its effect. Before the resume a failure
does no harm: the generator is paused, and the sync is attempted again. Who fails all attempts is
evicted; so is who lets the deadline of a pause or resume pass, since its event loop stands still. A
collective transfer fails for all when it fails for one: that one is evicted at once, with those
that wait for it, and the next attempt connects the others."""

import logging
import time
from collections.abc import Callable, Coroutine
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lrl.errors import CollectiveBroken
from lrl.generators.generator import CONTROL_DEADLINE_S, Generator, KeysAndValues, State
from lrl.generators.pool import GeneratorPool, Prove
from lrl.system.event_loop import LoopThread
from lrl.system.stopwatch import Stopwatch
from lrl.weights.pool_calls import MARGIN_S, Failures, PoolCalls
from lrl.weights.transport import Transport

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS = 2
"""At one sync."""
MAX_PHASES = 20
"""More than the phases of a sync that wait, each with its own deadline."""
ENDS_S = 10.0
"""Seconds for a sync in the background to notice the end of the run."""
LOOK_S = 0.2
"""Seconds between the looks of a trainer without any generator."""


class RunEnded(Exception):  # noqa: N818 - the run's end is no error
    """A sync was interrupted because its run ends."""


@dataclass(eq=False)
class Sync:
    """Runs the weight syncs of one pool."""

    pool: GeneratorPool
    loop: LoopThread
    transport: Transport
    make_proof: Callable[[list[Generator]], Prove]
    """From the policy as it is; called at the beginning of a sync."""
    deadline_s: float = field(kw_only=True)
    """Seconds for each phase."""
    silence_s: float = field(kw_only=True)
    """Seconds for a call that moves nothing (pause, resume)."""
    interrupted: Callable[[], None] = lambda: None
    """Called while the trainer waits; raises to end the wait."""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    keys_and_values: KeysAndValues = "recompute"
    """Of the responses in flight (`Generator.pause`)."""
    prove_every_n_syncs: int = 20
    """Syncs of a generator from one of its proofs to the next."""

    def __post_init__(self) -> None:
        self.recomputed_tokens = 0
        """That generators had to read again because of pauses, since the first sync."""
        self.pause_seconds = 0.0
        """Seconds without writing in the last sync."""
        self._calls = PoolCalls(
            self.loop,
            self.deadline_s,
            self.silence_s,
            interrupted=self._raise_if_interrupted,
            collective=self.transport.collective,
        )
        self._connected: set[Generator] = set()
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="lrl-sync")
        self._background: futures.Future[None] | None = None
        self._in_background = False
        """Whether the background uses the calls, and not the trainer's thread."""
        self._due: list[Generator] = []
        self._prove: Prove | None = None
        self._proofs: list[futures.Future[Failures]] = []
        self._ends = False

    # ---- for the trainer

    def sync(
        self,
        version: int,
        on_synced: Callable[[], Any] = lambda: None,
        *,
        in_background: bool = False,
    ) -> None:
        """Gives the weights to the pool, once the sync before has ended.

        Args:
            version: Of the weights.
            on_synced: Called when no generator of the pool writes under the version before any
                longer, `in_background` on another thread.
            in_background: Whether the trainer continues once the weights are copied.

        Raises:
            RuntimeError: No generator was proved in the first sync of the run: it is set up wrongly.
            NoGenerators: No generator has served for longer than `strategy.generator_timeout_s`.
        """
        pool = self.pool
        with self.stopwatch.within("stage"):
            self.wait()
            if in_background and self._sync_in_background(version, on_synced):
                return
            while True:
                failed = self.sync_now(version)
                if not pool.has_served:
                    failed |= self.wait()
                if failed and not pool.has_served:
                    raise RuntimeError("\n".join(failed.values()))
                self.finish_sync(failed)
                if pool.alive:
                    break
                # With several generators a replacement may always be there.
                pool.check_outage()
                while not pool.pending:
                    self.interrupted()
                    pool.check_outage()
                    time.sleep(LOOK_S)
            on_synced()

    def sync_now(self, version: int) -> Failures:
        """Gives the weights to all that do not hold them; returns those that failed, whose weights
        are unknown, and which must be evicted."""
        stale = self._begin(version)
        return self._attempts(stale) if stale else {}

    def finish_sync(self, failed: Failures) -> None:
        self._call(self.pool.finish_sync(failed), "evicting failed generators")

    def _sync_in_background(self, version: int, on_synced: Callable[[], Any]) -> bool:
        """Stages, and does the rest on a thread; returns whether that is possible."""
        if not self.transport.copies or not (stale := self._begin(version)):
            return False
        self._stage(stale)
        self._calls.log_failures(1, self._calls.failed)
        if self._calls.failed:
            return False
        self._in_background = True
        self._background = self._thread.submit(self._finish_in_background, stale, on_synced)
        return True

    def _finish_in_background(self, stale: list[Generator], on_synced: Callable[[], Any]) -> None:
        self.finish_sync(self._attempts(stale))
        on_synced()

    @property
    def is_broken(self) -> bool:
        """Whether a background sync has ended by an error, which `wait` raises."""
        background = self._background
        return background is not None and background.done() and background.exception() is not None

    def wait(self) -> Failures:
        """Waits for the end of the last sync and its proofs; returns the proofs' failures since the
        last wait."""
        with self.stopwatch.within("probe"):
            if self._background is not None:
                self._wait_for(self._background, "a sync during the step", MAX_PHASES)
                self._background = None
                self._in_background = False
            proofs, self._proofs = self._proofs, []
            failed = Failures()
            for one in proofs:
                of_one: Failures = self._wait_for(one, "the proof of a sync")
                failed |= of_one
            return failed

    def interrupt(self) -> None:
        """Ends a sync under way and its proofs with the run, which may save a checkpoint."""
        self._ends = True
        if self._background is not None:
            futures.wait([self._background], ENDS_S)
            error = self._background.exception() if self._background.done() else None
            # A signal is a SystemExit.
            if isinstance(error, Exception) and not isinstance(error, RunEnded):
                log.warning("The last sync failed: %s", error)
        for one in self._proofs:
            one.cancel()
        self._background = None
        self._proofs = []

    def close(self) -> None:
        self._ends = True
        self._thread.shutdown(wait=False)
        self.transport.close()

    # ---- a sync

    def _begin(self, version: int) -> list[Generator]:
        """Admits pending generators, and makes the proof of those that are due; returns all that
        get the weights."""
        self._call(self.pool.admit_pending(), "admitting generators")
        members = list(self.pool.generators)
        stale = [one for one in members if one.version != version or not one.serving]
        if stale:
            stale = members if self.transport.collective else stale
            self._calls.version = version
            self.pause_seconds = 0.0
            every = self.prove_every_n_syncs
            self._due = [one for one in stale if one.state is State.NEW or one.syncs % every == 0]
            self._prove = self.make_proof(self._due) if self._due else None
        return stale

    def _attempts(self, stale: list[Generator]) -> Failures:
        """Attempts a sync until all generators have succeeded or must be evicted; returns the
        latter. In the background the copy that is staged serves all attempts."""
        to_evict, late = Failures(), Failures()
        todo, calls = stale, self._calls
        for number in range(1, ATTEMPTS + 1):
            calls.begin(todo)
            if number > 1:
                calls.close_update()
            if not self._in_background:
                self.stopwatch.enter("stage")
                self._stage(todo)
            for phase in (self._pause, self._load, self._resume):
                if calls.participants:
                    phase()
            failed = {one: why for one, why in calls.failed.items() if one not in calls.hopeless}
            to_evict |= {one: why for one, why in calls.failed.items() if one in calls.hopeless}
            calls.log_failures(number, failed)
            # The first failure says most: later ones may follow from it.
            late = {one: late.get(one, why) for one, why in failed.items()}
            todo = [generator for generator in stale if generator in late]
            if not todo:
                break
        return to_evict | late

    def _stage(self, generators: list[Generator]) -> None:
        """Connects new generators (all, if the transport is collective and the pool has changed),
        and prepares the transfer while they still write."""
        calls = self._calls
        if self.transport.collective and self._connected != set(generators):
            self.transport.close()
            self._connected = set()
        new = [generator for generator in generators if generator not in self._connected]
        calls.begin(new)
        with self.transport.policy.ranks.within(calls.deadline_s):
            if new:
                try:
                    self.transport.connect(calls)
                except CollectiveBroken as error:
                    calls.fail_all(str(error))
                known = self._connected | set(calls.participants)
                self._connected = {generator for generator in known if generator.eviction is None}
            calls.generators = generators
            if calls.participants:
                self.transport.stage()

    def _pause(self) -> None:
        """Brings them the staged copy while they still write, then pauses them."""
        unreached = self.transport.distribute(self._calls)
        if not self._in_background:
            self.stopwatch.enter("transfer")
        self._paused_s = time.monotonic()
        self.recomputed_tokens += self._calls.pause(self.keys_and_values)
        self._calls.exclude(unreached)

    def _load(self) -> None:
        calls = self._calls
        try:
            calls.start_update()
            self.transport.send(calls)
            calls.finish_update()
        except CollectiveBroken as error:
            self._connected.clear()
            calls.fail_all(str(error))
        calls.confirm_version()

    def _resume(self) -> None:
        """Lets them write again, and starts to prove those that are due."""
        resumed_s = self._calls.resume()
        self.pause_seconds += resumed_s - self._paused_s
        self._call(self.pool.wake(), "sending requests")
        if due := [one for one in self._calls.participants if one in self._due]:
            assert self._prove is not None, "made for those that are due"
            self._proofs.append(self.loop.submit(self.pool.prove(due, self._prove)))

    def _raise_if_interrupted(self) -> None:
        if not self._in_background:
            self.interrupted()
        elif self._ends:
            raise RunEnded

    def _wait_for(self, future: futures.Future[T], what: str, phases: int = 1) -> T:
        deadline_s = phases * (self._calls.deadline_s + MARGIN_S)
        return self.loop.wait(future, deadline_s, what, self.interrupted)

    def _call(self, work: Coroutine[Any, Any, None], what: str) -> None:
        self.loop.wait(work, CONTROL_DEADLINE_S, what, lambda: None)
