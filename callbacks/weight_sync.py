"""Syncs every new version of the policy into the generators, and verifies that it arrived.

    sync (lrl.weights.sync) -> evict failed generators -> admit more prompts -> verify, during the next step

Half-written responses continue under the new weights; every token carries its version. A generator
that fails the probe is evicted, because nobody knows which weights wrote its tokens. The trainer
does not wait for the verification: until then no token of the new version leaves its generator
(`Generator.write`), none is saved, and no other sync begins. If the transport copies the weights,
the trainer does not wait for the pause either. Only the first sync is waited for. A replaced
generator joins at the next sync, or at an extra one while the trainer waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import lightning as L

from lrl.callbacks.base import OnRankZero
from lrl.generators.generator import KeysAndValues
from lrl.generators.pool import GeneratorPool, Probe
from lrl.strategies.generator_devices import raise_if_stopped
from lrl.system.config_errors import above, at_least, one_of
from lrl.weights.group_calls import Failures
from lrl.weights.probe import LONG_TEXT_TOKENS, LONG_TEXT_TOKENS_ON_CPU, FirstProof, Probes
from lrl.weights.sync import PoolSync

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule

PROBE_TOKENS = 64
LOOK_S = 0.2
"""Seconds between the looks of a trainer without any generator."""


class WeightSync(OnRankZero):
    """Syncs the policy's weights into the generators at the start and after optimizer steps.

    Args:
        every_n_steps: Steps between syncs; above 1, `data.max_lag` must be at least one less.
        deadline_s: Seconds that each phase of a sync may take; those that move nothing (pause,
            resume) have at most twice `strategy.heartbeat_s`.
        probe_tolerance: Largest mean difference in nats between the policy's and a generator's
            log-probs of the probe's tokens; None takes a few times the rounding that each generator
            has shown.
        keys_and_values: What a sync does with the keys and values of what is being written.
            `recompute` has them computed again by the new weights, which is exact and costs the
            reading of every half-written response and its prompt; `keep` continues with those of the
            older weights, at once.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        deadline_s: float = 300.0,
        probe_tolerance: float | None = None,
        keys_and_values: KeysAndValues = "recompute",
    ) -> None:
        at_least(1, "WeightSync", every_n_steps=every_n_steps)
        one_of("WeightSync", keys_and_values=(get_args(KeysAndValues), keys_and_values))
        above(0, "WeightSync", deadline_s=deadline_s, probe_tolerance=probe_tolerance)
        self.every_n_steps = every_n_steps
        self.deadline_s = deadline_s
        self.keys_and_values = keys_and_values
        self.version = -1
        """The version in the generators."""
        self.newest = -1
        """The version in the generators, or on its way."""
        self.pause_seconds = 0.0
        """Seconds of pause in the last finished sync."""
        self.probes = Probes(probe_tolerance, deadline_s)
        self._syncs: dict[GeneratorPool, PoolSync] = {}
        self._begun = 0  # the version with which the fit began

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that the generators had to read again because of syncs, since the first one."""
        return sum(sync.recomputed_tokens for sync in self._syncs.values())

    @property
    def fetched_bytes(self) -> int:
        """Bytes of weights that the generators fetched since the first sync, from rank 0 and from
        each other."""
        return sum(sync.transport.fetched_bytes for sync in self._syncs.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights that rank 0 sent since the first sync."""
        return sum(sync.transport.sent_bytes for sync in self._syncs.values())

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Registers this callback with the data module, whose waits poll it."""
        if (data := getattr(trainer, "datamodule", None)) is not None:
            data.weight_sync = self

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Runs the first sync. A checkpoint is loaded by now, so this also serves a resumed run."""
        self._begun = trainer.global_step
        self.sync(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Syncs the trainer's policy for a validation without training."""
        if not trainer.training and not trainer.sanity_checking:
            self.sync(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        """Syncs after each optimizer step: one Lightning batch is one step."""
        if trainer.global_step % self.every_n_steps == 0:
            self.sync(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Syncs the final policy, which an evaluation then samples, and waits until it is
        verified."""
        if self.newest != trainer.global_step:
            self.sync(trainer, pl_module)
        for pool in trainer.datamodule.fleet.pools:  # type: ignore[attr-defined]
            self.wait_until_verified(trainer, pool)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Cuts unverified tokens, since a checkpoint may be saved on the way out; releases the
        transports."""
        fleet = getattr(trainer.strategy, "fleet", None)
        if fleet is not None and not fleet.loop.closed:
            for sync in self._syncs.values():
                sync.end()
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Releases the transports."""
        self._close()

    def sync(self, trainer: L.Trainer, policy: Any) -> None:
        """Syncs the pool that writes rollouts and admits the prompts of the new version.

        With `max_lag` 0 the trainer has no other work, and waits.
        """
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        pool, version = data.fleet.rollouts, trainer.global_step
        sync = self._sync_of(trainer, pool)
        self.newest = version

        def on_synced() -> None:
            self.pause_seconds = sync.pause_seconds
            self.version = version
            if trainer.training:
                data.controller_calls.new_version(version)

        with data.stopwatch.within("stage"):
            self.wait_until_verified(trainer, pool)
            make_probe = self._probe_factory(trainer, policy, pool)
            begun = (
                trainer.training
                and pool.has_served
                and data.max_lag > 0
                and sync.sync_in_background(policy.sent_weights, version, make_probe, on_synced)
            )
            if not begun:
                self._sync_until_alive(trainer, policy, sync)
                on_synced()

    def poll(self, trainer: L.Trainer) -> None:
        """Syncs replaced generators, and generators that missed a sync; a waiting trainer calls it
        a few times a second.

        Raises:
            SIGTERMException: The run was stopped.
            NoGenerators: No generator has served for longer than `strategy.generator_timeout_s`.
        """
        raise_if_stopped(trainer)
        fleet = trainer.datamodule.fleet  # type: ignore[attr-defined]
        for pool in fleet.pools:
            fleet.outage_limit.check_outage(pool)
        if fleet.rollouts.pending or self._sync_of(trainer, fleet.rollouts).has_stale:
            self.sync(trainer, trainer.lightning_module)
        if fleet.evaluation is not None and fleet.evaluation.pending:
            self.sync_now(trainer, trainer.lightning_module, fleet.evaluation)

    def sync_now(self, trainer: L.Trainer, policy: Any, pool: GeneratorPool) -> None:
        """Syncs `pool`, waits until it has the weights, and starts their verification.

        Raises:
            RuntimeError: No generator passed the probe in the first sync of the run: it is set up
                wrongly.
            NoGenerators: No generator has served for longer than `strategy.generator_timeout_s`.
        """
        with trainer.datamodule.stopwatch.within("stage"):  # type: ignore[attr-defined]
            self.wait_until_verified(trainer, pool)
            self._sync_until_alive(trainer, policy, self._sync_of(trainer, pool))

    def wait_until_verified(self, trainer: L.Trainer, pool: GeneratorPool) -> Failures:
        """Waits until all that `pool` writes is verified or cut; returns the probes' failures since
        the last wait."""
        if pool not in self._syncs:
            return {}
        with trainer.datamodule.stopwatch.within("probe"):  # type: ignore[attr-defined]
            return self._syncs[pool].wait()

    def sampled_tolerance(self, trainer: L.Trainer, policy: Any) -> float | None:
        """Returns the tolerated mean difference of the log-probs at lag 0 from the policy's, in
        nats a token.

        None if the step's may differ for other reasons: those of a resumed run's first version may
        be of generators of the run before, and kept keys and values are of older weights.
        """
        version = trainer.global_step
        if version != 0 and (version == self._begun or self.keys_and_values == "keep"):
            return None
        temperature = trainer.datamodule.sampling.temperature  # type: ignore[attr-defined]
        return self.probes.sampled_tolerance(policy.training_dtype) / min(1.0, temperature)

    def _sync_until_alive(self, trainer: L.Trainer, policy: Any, sync: PoolSync) -> None:
        fleet, pool = trainer.datamodule.fleet, sync.pool  # type: ignore[attr-defined]
        make_probe = self._probe_factory(trainer, policy, pool)
        while True:
            failed = sync.sync_now(policy.sent_weights, trainer.global_step, make_probe)
            if not (trainer.training and pool.has_served):
                failed |= self.wait_until_verified(trainer, pool)
            if failed and not pool.serving and not pool.has_served:
                raise RuntimeError("\n".join(failed.values()))
            sync.finish_sync(failed)
            if pool.alive:
                return
            # With several generators a replacement may always be there.
            fleet.outage_limit.check_outage(pool)
            while not pool.pending:
                raise_if_stopped(trainer)
                fleet.outage_limit.check_outage(pool)
                time.sleep(LOOK_S)

    def _sync_of(self, trainer: L.Trainer, pool: GeneratorPool) -> PoolSync:
        if pool not in self._syncs:
            strategy: Any = trainer.strategy
            fleet = strategy.fleet
            self._syncs[pool] = PoolSync(
                pool,
                fleet.loop,
                strategy.transport,
                name=f"{strategy.run_id}-{len(self._syncs)}",
                deadline_s=self.deadline_s,
                silence_s=2 * fleet.heartbeat_s,
                interrupted=lambda: raise_if_stopped(trainer),
                entered=trainer.datamodule.stopwatch.enter,  # type: ignore[attr-defined]
                keys_and_values=self.keys_and_values,
            )
        return self._syncs[pool]

    def _probe_factory(
        self, trainer: L.Trainer, policy: Any, pool: GeneratorPool
    ) -> Callable[[], Probe]:
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        on_cuda = trainer.strategy.root_device.type == "cuda"
        longest = LONG_TEXT_TOKENS if on_cuda else LONG_TEXT_TOKENS_ON_CPU

        def make() -> Probe:
            tokens = data.probe_tokens(min(PROBE_TOKENS, data.max_model_tokens - 1))
            long = data.probe_tokens(min(longest, data.max_model_tokens - 1))
            first = FirstProof(pool.generators, long, policy.training_dtype)
            return self.probes.make(
                policy.prompt_logprobs,
                policy.compute_dtype,
                tokens,
                version=trainer.global_step,
                first=first,
            )

        return make

    def _close(self) -> None:
        for sync in self._syncs.values():
            sync.close()
        self._syncs.clear()
