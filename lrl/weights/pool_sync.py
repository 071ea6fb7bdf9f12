"""The syncs of one pool, one after another, each with its proof. The trainer waits for a sync, or goes on beside it.

    stage -> pause, update, resume -> settle -> moved -> proof
    `move`: all up to the resume while the trainer waits
    `start`: the stage while it waits, for only that needs the policy; the rest on a thread

Whichever way, the trainer does not wait for the proof: what is written before it stays in its generator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent import futures
from typing import Any

from lrl.generators.generator import CONTROL_DEADLINE_S, Generator
from lrl.generators.pool import GeneratorPool, Probe
from lrl.weights.base import Weights
from lrl.weights.sync import Failures, Sync

log = logging.getLogger(__name__)

PHASES = 20
"""More than a sync has that wait, each with a deadline of its own."""
ENDS_S = 10.0
"""For a sync that goes on beside the step to notice that the run ends; it looks every fifth of a second."""


class RunEnded(Exception):  # noqa: N818 - the run's end is no error
    """A sync was broken off because its run ends."""


class PoolSync:
    """What one pool is given.

    Args:
        pool: Who gets it.
        sync: How.
        interrupted: Called by the trainer's thread while it waits; raises to end the wait.
    """

    def __init__(self, pool: GeneratorPool, sync: Sync, interrupted: Callable[[], None]) -> None:
        self.pool = pool
        self.sync = sync
        self._loop, self._deadline_s = sync.control.loop, sync.control.deadline_s
        self._interrupted = interrupted
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="lrl-sync")
        self._delivery: futures.Future[Failures] | None = None
        self._proofs: list[futures.Future[Failures]] = []
        self._missed = False
        """Whether the last sync was beside a step and did not reach somebody: only `move` has all the ways."""
        self._ends = False

    @property
    def pause_seconds(self) -> float:
        """Seconds that the generators stood still in the last sync."""
        return self.sync.pause_seconds

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that the generators had to read again because of syncs, since the first one."""
        return self.sync.recomputed_tokens

    @property
    def has_stale(self) -> bool:
        """Whether somebody stands still whom a sync beside the step did not reach: a new one is needed."""
        if self._delivery is None or not self._delivery.done():
            return False
        return self._delivery.exception() is not None or bool(self._delivery.result())

    def move(self, weights: Weights, version: int, make_probe: Callable[[], Probe]) -> Failures:
        """Give the weights to whoever does not hold them; who failed and is to be taken out."""
        self._missed = False
        if not (whom := self._admit_pending(version)):
            return {}
        self.sync.control.interrupted = self._interrupted
        return self.sync.move(weights, whom, version, self._verify(make_probe()))

    def start(self, weights: Weights, version: int, make_probe: Callable[[], Probe], moved: Callable[[], Any]) -> bool:
        """Stage the weights, and let the rest go on while the trainer does something else.

        Args:
            weights: The policy's; it may be changed afterwards.
            version: What they are called.
            make_probe: Called at once.
            moved: Called on the thread when nobody writes any longer under what was there before.

        Returns:
            Whether that can be; otherwise nothing was done that `move` would not do.
        """
        if self._missed or not self.sync.copies or not (whom := self._admit_pending(version)):
            return False
        probe = make_probe()
        self.sync.control.interrupted = self._interrupted
        if not self.sync.stage(weights, whom, version):
            return False
        # A trainer that goes on may ask for an evaluation at once: it is to be one of the new version.
        self._call(self.pool.drain(whom), "closing the generators' doors")
        self.sync.control.interrupted = self._break_off
        self._delivery = self._thread.submit(self._deliver, probe, moved)
        return True

    def wait(self) -> Failures:
        """Wait until all that the pool writes is proved or taken back; who failed a probe since the last wait."""
        if self._delivery is not None:
            limit = PHASES * (self._deadline_s + 5.0)
            late = self._loop.wait_for(self._delivery, limit, "a sync beside the step", self._interrupted)
            self._delivery, self._missed = None, bool(late)
        failed, proofs, self._proofs = Failures(), self._proofs, []
        for proof in proofs:
            lied = self._loop.wait_for(proof, self._deadline_s + 5.0, "the proof of a sync", self._interrupted)
            failed.update(lied)
        return failed

    def finish_sync(self, failed: Failures) -> None:
        """A sync is over: take out who failed it."""
        self._call(self.pool.finish_sync(failed), "taking failed generators out")

    def end(self) -> None:
        """The run ends: break off what is under way and take back what is unproved."""
        self._ends = True
        if self._delivery is not None:
            futures.wait([self._delivery], ENDS_S)
            error = self._delivery.exception() if self._delivery.done() else None
            if isinstance(error, Exception) and not isinstance(error, RunEnded):  # SIGTERMException is no Exception
                log.warning("The last sync failed: %s", error)
        for proof in self._proofs:
            proof.cancel()
        self._delivery, self._proofs = None, []
        self._call(self.pool.drop_unverified("The run ended before it was proved."), "taking back what is unproved")

    def close(self) -> None:
        """Release the transport; idempotent."""
        self._ends = True
        self._thread.shutdown(wait=False)
        self.sync.close()

    def _admit_pending(self, version: int) -> list[Generator]:
        """Let newcomers join; who needs the weights."""
        self._call(self.pool.admit_pending(), "taking generators in")
        members = self.pool.generators
        stale = [generator for generator in members if generator.version != version or not generator.open]
        return list(members) if stale and self.sync.control.collective else stale

    def _deliver(self, probe: Probe, moved: Callable[[], Any]) -> Failures:
        given_up, late = self.sync.deliver_with_retry(self._verify(probe))
        self.finish_sync(given_up)
        moved()
        return late

    def _verify(self, probe: Probe) -> Callable[[list[Generator]], None]:
        return lambda resumed: self._proofs.append(self._loop.submit(self.pool.verify(resumed, probe)))

    def _break_off(self) -> None:
        if self._ends:
            raise RunEnded

    def _call(self, work: Any, what: str) -> Any:
        return self._loop.wait(work, CONTROL_DEADLINE_S, what, lambda: None)
