"""Syncs every new version of the policy into the generators: the settings of the run's syncs
(`lrl.weights.sync`), and their moments in a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import lightning as L

from lrl.callbacks.base import OnRankZero, run_of
from lrl.errors import above, at_least, one_of
from lrl.generators.generator import Generator, KeysAndValues, State
from lrl.generators.pool import GeneratorPool
from lrl.weights.proof import (
    FIRST_PROOF_TOKENS,
    FIRST_PROOF_TOKENS_ON_CPU,
    PROOF_TOKENS,
    Proof,
    format_of,
)
from lrl.weights.sync import Sync

if TYPE_CHECKING:
    from lrl.run import Run


class WeightSync(OnRankZero):
    """Syncs the policy's weights into the generators at the start and after optimizer steps.

    Args:
        every_n_steps: Steps between syncs; above 1, `data.max_lag` must be at least one less.
        deadline_s: Seconds that each phase of a sync may take; those that move nothing (pause,
            resume) have at most twice `strategy.heartbeat_s`.
        prove_every_n_syncs: Syncs from one proof of a generator to the next; 1 proves every sync. A
            proof compares its log-probs with the policy's. The first comes before the generator
            serves, later ones while it writes: wrong weights that no checksum shows last for so many
            syncs at most.
        probe_tolerance: Largest mean difference in nats between the policy's and a generator's
            log-probs in a proof; None takes a few times what the rounding of their number formats
            does to this policy.
        keys_and_values: What a sync does with the keys and values of what is being written.
            `recompute` has them computed again by the new weights, which is exact and costs the
            reading of every half-written response and its prompt; `keep` continues with those of the
            older weights, at once.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        deadline_s: float = 300.0,
        prove_every_n_syncs: int = 20,
        probe_tolerance: float | None = None,
        keys_and_values: KeysAndValues = "recompute",
    ) -> None:
        at_least(
            1, "WeightSync", every_n_steps=every_n_steps, prove_every_n_syncs=prove_every_n_syncs
        )
        one_of("WeightSync", keys_and_values=(get_args(KeysAndValues), keys_and_values))
        above(0, "WeightSync", deadline_s=deadline_s, probe_tolerance=probe_tolerance)
        self.every_n_steps = every_n_steps
        self.deadline_s = deadline_s
        self.prove_every_n_syncs = prove_every_n_syncs
        self.probe_tolerance = probe_tolerance
        self.keys_and_values = keys_and_values

    def make_syncs(self, run: Run) -> dict[GeneratorPool, Sync]:
        fleet, transport = run.fleet, run.strategy.choose_transport()
        return {
            pool: Sync(
                pool,
                run.loop,
                transport(run.policy, f"{run.strategy.run_id}-{number}"),
                make_proof=lambda generators: self._make_proof(run, generators),
                deadline_s=self.deadline_s,
                silence_s=min(self.deadline_s, 2 * fleet.heartbeat_s),
                interrupted=run.raise_if_stopped,
                stopwatch=run.stopwatch,
                keys_and_values=self.keys_and_values,
                prove_every_n_syncs=self.prove_every_n_syncs,
            )
            for number, pool in enumerate(fleet.pools)
        }

    def _make_proof(self, run: Run, generators: list[Generator]) -> Proof:
        tokens = PROOF_TOKENS
        if any(generator.state is State.NEW for generator in generators):
            on_cuda = run.strategy.root_device.type == "cuda"
            tokens = FIRST_PROOF_TOKENS if on_cuda else FIRST_PROOF_TOKENS_ON_CPU
        return Proof(
            run.policy.prompt_logprobs,
            run.policy.compute_dtype,
            format_of(generators[0].server.settings),  # all have one
            run.data.probe_tokens(min(tokens, run.data.max_model_tokens - 1)),
            version=run.trainer.global_step,
            tolerance=self.probe_tolerance,
            deadline_s=self.deadline_s,
        )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Runs the first sync. A checkpoint is loaded by now, so this also serves a resumed run."""
        run_of(trainer).begin()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.training and not trainer.sanity_checking:
            run_of(trainer).sync()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object
    ) -> None:
        if trainer.global_step % self.every_n_steps == 0:
            run_of(trainer).sync()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Syncs the final policy, which an evaluation then samples, and waits for the sync's end."""
        run = run_of(trainer)
        if run.newest != trainer.global_step:
            run.sync()
        for sync in run.syncs.values():
            sync.wait()
