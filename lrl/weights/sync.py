"""The syncs of one pool, one after another.

    stage -> distribute -> pause -> start, update, finish -> resume -> finish_sync

`sync_now` does all of it while the trainer waits; `sync_in_background` only the stage, which alone
needs the policy, and the rest on a thread during the next step (for transports that copy the
weights). After the resume those generators are proved that are due (`lrl.weights.proof`): a new one
before it serves, any other beside its writing. The trainer waits for none of it; the next sync
does. A generator that the distribution does not reach is paused with the others, because nothing
may begin under its older version once they hold the new one.

Each phase has a deadline and names itself, the generator and the seconds when it fails. A pause and
a version are also read back, because an answered call is no proof of its effect, and weights must
not change under a generator that writes. Before the resume a failure does no harm: the generator is
paused, and the sync is attempted again. A generator that fails all attempts is evicted; so is one
that lets the deadline of a pause or resume pass, since its event loop stands still. A collective
transfer fails for all when it fails for one: that one is evicted at once, with those that wait for
it, and the next attempt connects the others.
"""

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from typing import Any, TypeVar

from lrl.errors import CollectiveBroken
from lrl.generators.generator import CONTROL_DEADLINE_S, Generator, KeysAndValues, State
from lrl.generators.pool import GeneratorPool, Prove
from lrl.system.event_loop import LoopThread
from lrl.weights.pool_calls import MARGIN_S, Failures, PoolCalls
from lrl.weights.transport import Transport, Weights

log = logging.getLogger(__name__)

T = TypeVar("T")
MakeProof = Callable[[list[Generator]], Prove]
"""Makes the proof of generators from the policy as it is at the call."""

ATTEMPTS = 2
"""At one sync."""
MAX_PHASES = 20
"""More than the phases of a sync that wait, each with its own deadline."""
ENDS_S = 10.0
"""Seconds for a sync in the background to notice the end of the run; it looks every fifth of a
second."""


class RunEnded(Exception):  # noqa: N818 - the run's end is no error
    """A sync was interrupted because its run ends."""


class PoolSync:
    """Runs the weight syncs of one pool.

    Args:
        pool: The generators that are synced together.
        loop: The event loop that carries the calls to them.
        make_transport: Makes the trainer's end of the transfer.
        name: Of the connection, unique on this machine.
        deadline_s: Seconds for each phase.
        silence_s: Seconds for a call that moves nothing (pause, resume); at most `deadline_s`.
        interrupted: Called by the trainer's thread while it waits; raises to end the wait.
        entered: Called with each phase of `sync_now` that costs the trainer's time
            (`lrl.system.stopwatch.SYNC`).
        keys_and_values: What a pause does with those of the responses in flight
            (`Generator.pause`).
        prove_every_n_syncs: Syncs of a generator from one of its proofs to the next.
    """

    def __init__(
        self,
        pool: GeneratorPool,
        loop: LoopThread,
        make_transport: Callable[[], Transport],
        name: str,
        *,
        deadline_s: float,
        silence_s: float,
        interrupted: Callable[[], None] = lambda: None,
        entered: Callable[[str], Any] = lambda phase: None,
        keys_and_values: KeysAndValues = "recompute",
        prove_every_n_syncs: int = 20,
    ) -> None:
        self.pool = pool
        self.make_transport = make_transport
        self.name = name
        self.interrupted = interrupted
        self.entered = entered
        self.keys_and_values = keys_and_values
        self.prove_every_n_syncs = prove_every_n_syncs
        self.recomputed_tokens = 0
        """Tokens that the generators had to read again because of pauses, since the first sync."""
        self.pause_seconds = 0.0
        """Seconds without writing in the last sync."""
        self.transport = make_transport()
        """The trainer's end; a collective one is made anew when the pool changes."""
        self._loop = loop
        self._calls = PoolCalls(
            loop,
            deadline_s,
            silence_s,
            interrupted=self._raise_if_interrupted,
            collective=self.transport.collective,
        )
        self._connected: set[Generator] = set()
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="lrl-sync")
        self._background: futures.Future[None] | None = None
        self._in_background = False
        """Whether the background uses the calls, and not the trainer's thread."""
        self._due: list[Generator] = []
        """Those that this sync proves, by `_prove`."""
        self._prove: Prove | None = None
        self._proofs: list[futures.Future[Failures]] = []
        self._ends = False

    # ---- for the trainer

    def sync_now(self, weights: Weights, version: int, make_proof: MakeProof) -> Failures:
        """Gives the weights to all generators of the pool that do not hold them.

        Args:
            weights: The policy's.
            version: The version of the weights.
            make_proof: Called at once, if a generator is to be proved.

        Returns:
            The generators that failed; their weights are unknown, and they must be evicted.
        """
        if not (stale := self._admit_pending(version)):
            return {}
        self._begin(stale, make_proof)

        def stage(todo: list[Generator], number: int) -> None:
            self.entered("stage")
            self._stage(weights, todo, version)

        return self._attempts(stale, stage)

    def sync_in_background(
        self,
        weights: Weights,
        version: int,
        make_proof: MakeProof,
        on_synced: Callable[[], Any],
    ) -> bool:
        """Stages the weights, and does the rest on a thread.

        Args:
            weights: The policy's; it may be changed afterwards.
            version: Their version.
            make_proof: Called at once, if a generator is to be proved.
            on_synced: Called on the thread when no generator writes under the version before any
                longer.

        Returns:
            Whether that is possible; otherwise nothing was done that `sync_now` would not do.
        """
        if not self.transport.copies:
            return False
        if not (stale := self._admit_pending(version)):
            return False
        self._begin(stale, make_proof)
        self._stage(weights, stale, version)
        self._calls.log_failures(1, self._calls.failed)
        if self._calls.failed:
            return False
        if not self.transport.fetches:  # while they fetch, they take requests: it may be minutes
            self._call(self.pool.drain(stale), "draining generators")
        self._in_background = True
        self._background = self._thread.submit(self._run_in_background, stale, on_synced)
        return True

    @property
    def is_broken(self) -> bool:
        """Whether a sync in the background has ended by an error, which `wait` raises."""
        background = self._background
        return background is not None and background.done() and background.exception() is not None

    def wait(self) -> Failures:
        """Waits until the last sync and its proofs have ended; returns the proofs' failures since
        the last wait."""
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

    def finish_sync(self, failed: Failures) -> None:
        """Ends a sync and evicts the generators that failed it."""
        self._call(self.pool.finish_sync(failed), "evicting failed generators")

    def end(self) -> None:
        """Ends with the run: interrupts a sync under way, and its proofs."""
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
        """Releases the transport; idempotent."""
        self._ends = True
        self._thread.shutdown(wait=False)
        self.transport.close()

    # ---- a sync

    def _attempts(
        self, generators: Sequence[Generator], prepare: Callable[[list[Generator], int], None]
    ) -> Failures:
        """Attempts a sync until all of `generators` have succeeded or must be evicted; returns the
        latter.

        Args:
            generators: The receivers; a collective transport needs the whole pool.
            prepare: Called before each attempt, with its receivers and its number, while they write.
        """
        to_evict, late = Failures(), Failures()
        todo = list(generators)
        for number in range(1, ATTEMPTS + 1):
            prepare(todo, number)
            unreached = self.transport.distribute(self._calls) if self._calls.participants else {}
            if not self._in_background:
                self.entered("transfer")
            hopeless, failed = self._attempt(unreached, number)
            to_evict |= hopeless
            # The first failure says most: later ones may follow from it.
            late = {one: late.get(one, why) for one, why in failed.items()}
            todo = [generator for generator in generators if generator in late]
            if not todo:
                break
        return to_evict | late

    def _run_in_background(
        self, generators: Sequence[Generator], on_synced: Callable[[], Any]
    ) -> None:
        """Does the rest of a sync from the staged copy, without the policy, which has changed."""

        def direct(todo: list[Generator], number: int) -> None:
            if number > 1:
                self._calls.begin(todo, self._calls.version)

        self.finish_sync(self._attempts(generators, direct))
        on_synced()

    def _admit_pending(self, version: int) -> list[Generator]:
        """Admits pending generators; returns the generators that need the weights."""
        self._call(self.pool.admit_pending(), "admitting generators")
        members = list(self.pool.generators)
        stale = [one for one in members if one.version != version or not one.serving]
        return members if stale and self.transport.collective else stale

    def _begin(self, generators: Sequence[Generator], make_proof: MakeProof) -> None:
        """Begins a sync of `generators`, and makes the proof of those that are due."""
        self.pause_seconds = 0.0
        self._due = [
            one
            for one in generators
            if one.state is State.NEW or one.syncs % self.prove_every_n_syncs == 0
        ]
        self._prove = make_proof(self._due) if self._due else None

    def _stage(self, weights: Weights, generators: Sequence[Generator], version: int) -> None:
        """Prepares the transfer while the generators still write."""
        self._connect(weights, generators, version)
        self._calls.include(generators)
        if self._calls.participants:
            self.transport.stage(weights)

    def _connect(self, weights: Weights, generators: Sequence[Generator], version: int) -> None:
        """Connects new generators; all of them if the transport is collective and the pool has
        changed."""
        if self.transport.collective and self._connected != set(generators):
            self.transport.close()
            self.transport = self.make_transport()
            self._connected = set()
        new = [generator for generator in generators if generator not in self._connected]
        self._calls.begin(new, version)
        if not new:
            return
        try:
            self.transport.connect(self._calls, weights, self.name)
        except CollectiveBroken as error:
            self._calls.fail_all(str(error))
        known = self._connected | set(self._calls.participants)
        self._connected = {generator for generator in known if generator.eviction is None}

    def _attempt(self, unreached: Failures, number: int) -> tuple[Failures, Failures]:
        """Moves the staged weights into the generators and resumes them; returns the generators to
        evict and to retry.

        Those that are `unreached` are only paused, and retried.
        """
        calls, paused_s = self._calls, time.monotonic()
        if calls.participants:
            self.recomputed_tokens += calls.pause(self.keys_and_values)
            calls.exclude(unreached)
        if calls.participants:
            self._update()
        to_evict = calls.hopeless
        late = {one: why for one, why in calls.failed.items() if one not in to_evict}
        if calls.participants:
            to_evict |= calls.resume()
            self.pause_seconds += calls.resumed_s - paused_s
            self._call(self.pool.wake(), "sending requests")
            self._start_proofs()
        calls.log_failures(number, late)
        return to_evict, late

    def _start_proofs(self) -> None:
        """Starts to prove those that are due and have just resumed."""
        due = [one for one in self._calls.participants if one in self._due]
        if due and self._prove is not None:
            self._proofs.append(self._loop.submit(self.pool.prove(due, self._prove)))

    def _update(self) -> None:
        """Replaces the weights of the paused generators."""
        self._calls.close_update()
        try:
            self._calls.start_update()
            self.transport.send(self._calls)
            self._calls.finish_update()
        except CollectiveBroken as error:
            self._connected.clear()
            self._calls.fail_all(str(error))
        self._calls.confirm_version()

    def _raise_if_interrupted(self) -> None:
        if not self._in_background:
            self.interrupted()
        elif self._ends:
            raise RunEnded

    def _wait_for(self, future: futures.Future[T], what: str, phases: int = 1) -> T:
        deadline_s = phases * (self._calls.deadline_s + MARGIN_S)
        return self._loop.wait_for(future, deadline_s, what, self.interrupted)

    def _call(self, work: Coroutine[Any, Any, None], what: str) -> None:
        self._loop.wait(work, CONTROL_DEADLINE_S, what, lambda: None)
