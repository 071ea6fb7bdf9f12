"""Moves every new version of the policy into the generators, and proves that it arrived.

    sync (lrl.weights.sync) -> take out who failed -> admit more prompts        -> prove, beside the next step

The pause is short because everything that can be done before it is. What was being written goes on under the new
weights; every token knows its version. A generator that cannot be proved to hold them is taken out: rollouts by unknown
weights are worth nothing. The trainer does not wait for the proof: until it is there nothing that was written under the
new weights leaves its generator (`Generator.write`), none is saved, and no other sync begins. Only the first one is
waited for. A generator that comes back joins at the next sync, or at one of its own while the trainer waits.
"""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import Future
from statistics import fmean
from typing import TYPE_CHECKING, Any

import lightning as L

from lrl.callbacks.on_rank_zero import OnRankZero
from lrl.faults import above, at_least
from lrl.generators.client import GeneratorError
from lrl.generators.crew import Crew, Probe
from lrl.strategy import stop_if_told
from lrl.weights import Control, make_transport
from lrl.weights.sync import Sync

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.generators.generator import Generator
    from lrl.policy import PolicyModule

PROBE_TOKENS = 64
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""Largest mean difference in nats per token that counts as the same weights. The mean and not the maximum: in bfloat16
single prompt tokens of the quickstart's policy were off by 0.6, at a mean of 0.06. A tensor that is missing made 0.75
or more, weights that are one step old 0.005, and two programs in float32 5e-7."""
LOOK_S = 0.2
"""How often a trainer without a generator looks whether one came back."""


class WeightSync(OnRankZero):
    """Syncs the policy's weights into the generators at the start and after optimizer steps.

    Args:
        every_n_steps: Steps between syncs; above 1, `data.max_lag` must be at least one less.
        deadline_s: Seconds that each phase of a sync may take; those that move nothing (pause, resume) have at most
            twice `strategy.heartbeat_s`.
        probe_tolerance: Largest mean difference in nats between the policy's and a generator's log-probs of the probe's
            tokens; None takes a value that suits the generators' dtype.
    """

    def __init__(self, every_n_steps: int = 1, deadline_s: float = 300.0, probe_tolerance: float | None = None) -> None:
        at_least(1, "WeightSync", every_n_steps=every_n_steps)
        above(0, "WeightSync", deadline_s=deadline_s, probe_tolerance=probe_tolerance)
        self.every_n_steps = every_n_steps
        self.deadline_s = deadline_s
        self.probe_tolerance = probe_tolerance
        self.version = -1
        """The version the generators hold."""
        self.seconds = 0.0
        """Seconds of the trainer that the last sync took, staging included."""
        self.pause_seconds = 0.0
        """Seconds the generators stood still in it."""
        self.probe_difference = 0.0
        """Largest mean difference that the last probe saw in a generator, in nats per token."""
        self._syncs: dict[Crew, Sync] = {}
        self._proofs: defaultdict[Crew, list[Future[dict[Generator, str]]]] = defaultdict(list)  # on their way
        self._probes = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first sync. By now a checkpoint is loaded, so it also serves a resumed run."""
        self.sync(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Without training, what is evaluated is the policy in the trainer, whatever it was loaded from."""
        if not trainer.training and not trainer.sanity_checking:
            self.sync(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """One Lightning batch is one optimizer step, so this is right after each new version."""
        if trainer.global_step % self.every_n_steps == 0:
            self.sync(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last sync is proved, too."""
        for crew in trainer.datamodule.fleet.crews:  # type: ignore[attr-defined]
            self.wait_for_proof(trainer, crew)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Take back what is unproved, for a checkpoint may be saved on the way out; release the transports."""
        for proof in [proof for proofs in self._proofs.values() for proof in proofs]:
            proof.cancel()
        self._proofs.clear()
        fleet = getattr(trainer.strategy, "fleet", None)
        if fleet is not None and not fleet.loop.closed:
            for crew in fleet.crews:
                fleet.call(crew.drop_unproved("The run ended before it was proved."), "taking back what is unproved")
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Release the transports."""
        self._close()

    def sync(self, trainer: L.Trainer, policy: Any) -> None:
        """Move the policy's weights into the generators that write rollouts, and start what may start under them."""
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        started = time.monotonic()
        self.pause_seconds = self.move(trainer, policy, data.fleet.rollouts)
        self.version = trainer.global_step
        self.seconds = time.monotonic() - started
        if trainer.training:
            data.new_version(self.version)

    def tend(self, trainer: L.Trainer) -> None:
        """Take in generators that came back; a waiting trainer calls it a few times a second.

        Raises:
            NoGenerators: None has served for longer than the run may wait.
        """
        fleet = trainer.datamodule.fleet  # type: ignore[attr-defined]
        for crew in fleet.crews:
            fleet.patience.expect_one(crew)
        if fleet.rollouts.newcomers:
            self.sync(trainer, trainer.lightning_module)
        if fleet.evaluation is not None and fleet.evaluation.newcomers:
            self.move(trainer, trainer.lightning_module, fleet.evaluation)

    def move(self, trainer: L.Trainer, policy: Any, crew: Crew) -> float:
        """Give `crew` the policy's weights, and see to it that they are proved; the seconds of its pause.

        Raises:
            RuntimeError: No generator could be proved in the first sync of the run: it is set up wrongly.
            NoGenerators: None has served for longer than the run may wait.
        """
        with trainer.datamodule.stopwatch.within("stage"):  # type: ignore[attr-defined]
            self.wait_for_proof(trainer, crew)
            return self._move(trainer, policy, crew)

    def wait_for_proof(self, trainer: L.Trainer, crew: Crew) -> dict[Generator, str]:
        """Wait until all that `crew` writes is proved or taken back; who failed since the last wait, and why."""
        fleet = trainer.datamodule.fleet  # type: ignore[attr-defined]
        failed: dict[Generator, str] = {}
        proofs = self._proofs.pop(crew, [])
        with trainer.datamodule.stopwatch.within("probe"):  # type: ignore[attr-defined]
            for proof in proofs:
                failed |= fleet.loop.wait_for(
                    proof, self.deadline_s + 5.0, "the proof of a sync", lambda: stop_if_told(trainer)
                )
        return failed

    def _move(self, trainer: L.Trainer, policy: Any, crew: Crew) -> float:
        fleet = trainer.datamodule.fleet  # type: ignore[attr-defined]
        seconds = 0.0
        while True:
            fleet.call(crew.take_in(), "taking generators in")
            failed = self._move_once(trainer, policy, crew)
            seconds += self._syncs[crew].pause_seconds
            if not (trainer.training and crew.has_served):
                failed |= self.wait_for_proof(trainer, crew)
            if failed and not crew.serving and not crew.has_served:
                raise RuntimeError("\n".join(failed.values()))
            fleet.call(crew.settle(failed), "taking failed generators out")
            if crew.alive:
                return seconds
            while not crew.newcomers:
                stop_if_told(trainer)
                fleet.patience.expect_one(crew)
                time.sleep(LOOK_S)

    def _move_once(self, trainer: L.Trainer, policy: Any, crew: Crew) -> dict[Generator, str]:
        """Sync whoever does not hold the policy's version; who failed, and why."""
        sync, version = self._sync_of(trainer, crew), trainer.global_step
        sync.pause_seconds = 0.0
        stale = [generator for generator in crew.generators if generator.version != version or not generator.open]
        if not stale:
            return {}
        whom = crew.generators if sync.control.collective else stale
        probe, proofs = self._probe(trainer, policy), self._proofs[crew]
        return sync.move(
            policy.named_weights,
            whom,
            version,
            lambda resumed: proofs.append(sync.control.loop.submit(crew.prove(resumed, probe))),
        )

    def _sync_of(self, trainer: L.Trainer, crew: Crew) -> Sync:
        if crew not in self._syncs:
            strategy: Any = trainer.strategy
            fleet = strategy.fleet
            control = Control(fleet.loop, self.deadline_s, 2 * fleet.heartbeat_s, lambda: stop_if_told(trainer))
            name = f"{strategy.run_id}-{len(self._syncs)}"
            entered = trainer.datamodule.stopwatch.enter  # type: ignore[attr-defined]
            self._syncs[crew] = Sync(control, lambda: make_transport(strategy.transport), name, entered)
        return self._syncs[crew]

    def _close(self) -> None:
        for sync in self._syncs.values():
            sync.close()
        self._syncs.clear()

    def _probe(self, trainer: L.Trainer, policy: PolicyModule) -> Probe:
        """Compares the log-probs of a few real prompts, computed by the policy now, with a generator's."""
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        tokens = data.probe_tokens(min(PROBE_TOKENS, data.max_model_tokens - 1))
        expected, version = policy.prompt_logprobs(tokens), trainer.global_step
        self.probe_difference = 0.0
        self._probes += 1
        salt = f"probe-{self._probes}"  # never the keys and values of an earlier probe

        async def probe(generator: Generator) -> None:
            found = await generator.client.prompt_logprobs(tokens, salt=salt, deadline_s=self.deadline_s)
            difference = fmean(abs(a - b) for a, b in zip(expected, found, strict=True))
            self.probe_difference = max(self.probe_difference, difference)
            dtypes = {policy.dtype_name, generator.server.settings.dtype}
            tolerance = self.probe_tolerance or max(PROBE_TOLERANCE[dtype] for dtype in dtypes)
            if not difference <= tolerance:
                raise GeneratorError(
                    f"{generator.name} does not compute what the policy computes after the sync to version {version}: "
                    f"the probe's log-probs are off by {difference:.3g} nats a token, and {tolerance:g} is allowed "
                    "(WeightSync.probe_tolerance). The weights did not arrive whole, or trainer and generator "
                    "disagree about the model (dtype, attention). No rollout of this version was trained."
                )
            generator.prove()

        return probe
