"""Syncs every new version of the policy into the generators: the settings of the run's syncs
(`lrl.weights.syncs`), and their moments in a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import lightning as L

from lrl.callbacks.base import OnRankZero, run_of
from lrl.generators.generator import KeysAndValues
from lrl.generators.pool import GeneratorPool, Probe
from lrl.system.config_errors import above, at_least, one_of
from lrl.weights.probe import LONG_TEXT_TOKENS, LONG_TEXT_TOKENS_ON_CPU, FirstProof, Probes
from lrl.weights.syncs import Syncs

if TYPE_CHECKING:
    from lrl.run import Run

PROBE_TOKENS = 64


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
        self.probes = Probes(probe_tolerance, deadline_s)

    def make_syncs(self, run: Run) -> Syncs:
        """Returns the syncs of a run."""
        return Syncs(
            run.fleet,
            run.strategy.choose_transport(),
            run.policy.sent_weights,
            lambda pool: self._make_probe(run, pool),
            name=run.strategy.run_id,
            deadline_s=self.deadline_s,
            keys_and_values=self.keys_and_values,
            interrupted=run.raise_if_stopped,
            stopwatch=run.stopwatch,
        )

    def _make_probe(self, run: Run, pool: GeneratorPool) -> Probe:
        policy, data = run.policy, run.data
        on_cuda = run.strategy.root_device.type == "cuda"
        most = data.max_model_tokens - 1
        long = data.probe_tokens(
            min(LONG_TEXT_TOKENS if on_cuda else LONG_TEXT_TOKENS_ON_CPU, most)
        )
        return self.probes.make(
            policy.prompt_logprobs,
            policy.compute_dtype,
            data.probe_tokens(min(PROBE_TOKENS, most)),
            version=run.trainer.global_step,
            first=FirstProof(pool.generators, long, policy.training_dtype),
        )

    def sampled_tolerance(self, run: Run) -> float | None:
        """Returns the tolerated mean difference of the log-probs at lag 0 from the policy's, in
        nats a token.

        None if the step's may differ for other reasons: those of a resumed run's first version may
        be of generators of the run before, and kept keys and values are of older weights.
        """
        version = run.trainer.global_step
        if version != 0 and (version == run.first_version or self.keys_and_values == "keep"):
            return None
        tolerance = self.probes.sampled_tolerance(run.policy.training_dtype)
        return tolerance / min(1.0, run.data.sampling.temperature)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Runs the first sync. A checkpoint is loaded by now, so this also serves a resumed run."""
        run_of(trainer).begin()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Syncs the trainer's policy for a validation without training."""
        if not trainer.training and not trainer.sanity_checking:
            run_of(trainer).sync()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object
    ) -> None:
        """Syncs after each optimizer step: one Lightning batch is one step."""
        if trainer.global_step % self.every_n_steps == 0:
            run_of(trainer).sync()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Syncs the final policy, which an evaluation then samples, and waits until it is
        verified."""
        run = run_of(trainer)
        if run.newest != trainer.global_step:
            run.sync()
        for pool in run.fleet.pools:
            run.syncs.wait_until_verified(pool)
