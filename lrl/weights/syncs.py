"""The syncs of a run: one for each pool of its generators.

    sync (lrl.weights.sync) -> evict failed generators -> admit more prompts

Half-written responses continue under the new weights; every token carries its version. If the
transport copies the weights, the trainer does not wait for the pause. Only the first sync of a run
is waited for until it is proved. A replaced generator joins at the next sync, or at an extra one
while the trainer waits.
"""

import time
from collections.abc import Callable
from typing import Any

from lrl.generators.fleet import Fleet
from lrl.generators.generator import KeysAndValues
from lrl.generators.pool import GeneratorPool
from lrl.system.stopwatch import Stopwatch
from lrl.weights.pool_calls import Failures
from lrl.weights.sync import MakeProof, PoolSync
from lrl.weights.transport import Transport, Weights

LOOK_S = 0.2
"""Seconds between the looks of a trainer without any generator."""


class Syncs:
    """Syncs the pools of a fleet.

    Args:
        fleet: The generators.
        transport: Makes the trainer's end of a transfer.
        weights: The policy's.
        make_proof: Makes the proof of generators.
        name: Of the connections, unique on this machine.
        deadline_s: Seconds for each phase.
        keys_and_values: What a pause does with those of the responses in flight.
        prove_every_n_syncs: Syncs of a generator from one of its proofs to the next.
        interrupted: Raises to end a wait of the trainer's thread.
        stopwatch: The trainer's.
    """

    def __init__(
        self,
        fleet: Fleet,
        transport: Callable[[], Transport],
        weights: Weights,
        make_proof: MakeProof,
        *,
        name: str,
        deadline_s: float,
        keys_and_values: KeysAndValues,
        prove_every_n_syncs: int,
        interrupted: Callable[[], None],
        stopwatch: Stopwatch,
    ) -> None:
        self._fleet = fleet
        self._weights = weights
        self._make_proof = make_proof
        self._interrupted = interrupted
        self._stopwatch = stopwatch
        self.pools = {
            pool: PoolSync(
                pool,
                fleet.loop,
                transport,
                name=f"{name}-{number}",
                deadline_s=deadline_s,
                silence_s=2 * fleet.heartbeat_s,
                interrupted=interrupted,
                entered=stopwatch.enter,
                keys_and_values=keys_and_values,
                prove_every_n_syncs=prove_every_n_syncs,
            )
            for number, pool in enumerate(fleet.pools)
        }
        """The sync of each pool."""

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that the generators had to read again because of syncs."""
        return sum(sync.recomputed_tokens for sync in self.pools.values())

    @property
    def fetched_bytes(self) -> int:
        """Bytes of weights that the generators fetched, from rank 0 and from each other."""
        return sum(sync.transport.fetched_bytes for sync in self.pools.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights that rank 0 sent."""
        return sum(sync.transport.sent_bytes for sync in self.pools.values())

    def sync(
        self,
        pool: GeneratorPool,
        version: int,
        on_synced: Callable[[], Any] = lambda: None,
        *,
        in_background: bool = False,
    ) -> None:
        """Gives the weights to a pool, once its sync before has ended.

        Args:
            pool: The generators.
            version: The version of the weights.
            on_synced: Called when no generator of the pool writes under the version before any
                longer, `in_background` on another thread.
            in_background: Whether the trainer continues once the weights are copied, if the transport
                copies them.

        Raises:
            RuntimeError: No generator was proved in the first sync of the run: it is set up wrongly.
            NoGenerators: No generator has served for longer than `strategy.generator_timeout_s`.
        """
        sync = self.pools[pool]
        with self._stopwatch.within("stage"):
            self.wait(pool)
            if in_background and sync.sync_in_background(
                self._weights, version, self._make_proof, on_synced
            ):
                return
            self._sync_until_alive(sync, version)
            on_synced()

    def _sync_until_alive(self, sync: PoolSync, version: int) -> None:
        pool, outage = sync.pool, self._fleet.outage_limit
        while True:
            failed = sync.sync_now(self._weights, version, self._make_proof)
            if not pool.has_served:
                failed |= self.wait(pool)
            if failed and not pool.has_served:
                raise RuntimeError("\n".join(failed.values()))
            sync.finish_sync(failed)
            if pool.alive:
                return
            # With several generators a replacement may always be there.
            outage.check_outage(pool)
            while not pool.pending:
                self._interrupted()
                outage.check_outage(pool)
                time.sleep(LOOK_S)

    def wait(self, pool: GeneratorPool) -> Failures:
        """Waits until the last sync of `pool` and its proofs have ended; returns the proofs'
        failures since the last wait."""
        with self._stopwatch.within("probe"):
            return self.pools[pool].wait()

    def interrupt(self) -> None:
        """Interrupts a sync under way: the run ends by an error, and may save a checkpoint."""
        for sync in self.pools.values():
            sync.end()

    def close(self) -> None:
        """Releases the transports; idempotent."""
        for sync in self.pools.values():
            sync.close()
