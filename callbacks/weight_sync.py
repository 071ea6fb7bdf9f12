"""Moves every new version of the policy into the generators, and proves that it arrived.

    stage -> pause -> send -> resume -> probe -> admit more prompts

The pause is short because everything that can be done before it is. What was being written goes on under the new
weights; every token knows its version. A sync that cannot be proved ends the run: rollouts by unknown weights are worth
nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import lightning as L

from lrl.weights import Control, Transport, make_transport

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.generators.crew import Crew
    from lrl.policy import PolicyModule

PROBE_TOKENS = 64
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""Largest difference in nats per token that counts as the same weights. On a CPU, float32 agreed within 5e-7."""


class WeightSync(L.Callback):
    """Syncs the policy's weights into the generators at the start and after optimizer steps.

    Args:
        every_n_steps: Steps between syncs; above 1, `data.max_lag` must be at least one less.
        deadline_s: Seconds that each phase of a sync may take.
        probe_tolerance: Largest difference in nats between the policy's and a generator's log-prob of a probe token;
            None takes a value that suits the generators' dtype.
    """

    def __init__(self, every_n_steps: int = 1, deadline_s: float = 300.0, probe_tolerance: float | None = None) -> None:
        if every_n_steps < 1:
            raise ValueError(f"WeightSync.every_n_steps is {every_n_steps}; it must be at least 1.")
        self.every_n_steps = every_n_steps
        self.deadline_s = deadline_s
        self.probe_tolerance = probe_tolerance
        self.version = -1
        """The version the generators hold."""
        self.seconds = 0.0
        """Seconds the last sync took, staging and probe included."""
        self.pause_seconds = 0.0
        """Seconds the generators stood still in it."""
        self.probe_difference = 0.0
        """Largest difference that the last probe saw, in nats."""
        self._links: dict[Crew, tuple[Control, Transport]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse settings under which no group could ever start."""
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        if stage == "fit" and data.max_lag < self.every_n_steps - 1:
            raise ValueError(
                f"WeightSync.every_n_steps is {self.every_n_steps} and data.max_lag is {data.max_lag}: step "
                f"{data.max_lag + 1} would wait for ever. Set data.max_lag to at least {self.every_n_steps - 1}."
            )

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

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Release the transports: Lightning does not call `teardown` after an error."""
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

    def move(self, trainer: L.Trainer, policy: Any, crew: Crew) -> float:
        """Give `crew` the policy's weights and probe them; returns the seconds it was paused."""
        fleet = trainer.datamodule.fleet  # type: ignore[attr-defined]
        version = trainer.global_step
        control, transport = self._link(trainer, policy, crew)
        control.version = version
        transport.stage(policy.named_weights)
        paused = time.monotonic()
        fleet.call(crew.pause(), f"pausing the generators for version {version}", self.deadline_s)
        transport.send(control)
        fleet.call(crew.resume(version), f"resuming the generators with version {version}", self.deadline_s)
        seconds = time.monotonic() - paused
        self._probe(trainer, policy, crew)
        return seconds

    def _link(self, trainer: L.Trainer, policy: PolicyModule, crew: Crew) -> tuple[Control, Transport]:
        """The crew's transport, connected at its first sync."""
        if crew not in self._links:
            strategy: Any = trainer.strategy
            control, transport = Control(crew, strategy.fleet.loop, self.deadline_s), make_transport(strategy.transport)
            self._links[crew] = control, transport
            transport.connect(control, policy.named_weights, f"{strategy.run_id}-{len(self._links)}")
        return self._links[crew]

    def _close(self) -> None:
        for _, transport in self._links.values():
            transport.close()
        self._links.clear()

    def _probe(self, trainer: L.Trainer, policy: PolicyModule, crew: Crew) -> None:
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        tokens = data.probe_tokens(min(PROBE_TOKENS, data.max_model_tokens - 1))
        expected = policy.prompt_logprobs(tokens)
        dtypes = {policy.dtype_name, crew.generators[0].server.settings.dtype}
        tolerance = self.probe_tolerance or max(PROBE_TOLERANCE[dtype] for dtype in dtypes)
        self.probe_difference = 0.0
        for generator in crew.generators:
            ask = generator.client.prompt_logprobs(tokens, salt=f"probe-{crew.version}", deadline_s=self.deadline_s)
            found = data.fleet.call(ask, f"probing {generator.server.name}", self.deadline_s + 5.0)
            difference = max(abs(a - b) for a, b in zip(expected, found, strict=True))
            self.probe_difference = max(self.probe_difference, difference)
            if not difference <= tolerance:
                raise RuntimeError(
                    f"{generator.server.name} does not compute what the policy computes after the sync to version "
                    f"{crew.version}: a probe token's log-prob is off by {difference:.3g} nats, and {tolerance:g} is "
                    "allowed (WeightSync.probe_tolerance). The weights did not arrive whole, or trainer and generator "
                    "disagree about the model (dtype, attention). No rollout of this version was trained."
                )
