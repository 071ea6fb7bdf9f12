"""The callbacks that write a target's journal: one after each step, one on a thread that watches
the fleet.

launch   the process runs
start    the first version is in the generators; what the checkpoint held
step     an optimizer step is done, its checkpoint not yet written
lost     a generator was evicted          whole    all of them serve again
end      the last step is done, with the ledger
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning as L

from benchmarks.chaos.journal import Journal
from lrl.callbacks.base import run_of
from lrl.generators.fleet import Fleet
from lrl.types import Group

LOOK_S = 0.1
"""Seconds between two looks at the fleet."""


class StepRecorder(L.Callback):
    """Writes the steps of one launch into the journal, and ends the run after the step that finds
    the `stop_file`; put it after every other callback but the checkpoint's."""

    def __init__(self, journal: Journal, stop_file: Path) -> None:
        self.journal = journal
        self.stop_file = stop_file
        # Index of a group -> tokens of its half-written responses.
        self._begun: dict[int, list[list[int]]] = {}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for group in checkpoint["RolloutDataModule"]["ledger"]["running"]:
            responses = [part.tolist() for part in group["token_ids"].split(group["lengths"])]
            self._begun[group["index"]] = [
                response if _half_written(reason, episode) else []
                for response, reason, episode in zip(
                    responses, group["finish_reasons"], group["episodes"], strict=True
                )
            ]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        resumed = run_of(trainer).calls.controller.resumed
        found = {
            name: getattr(resumed, name) if resumed else 0
            for name in ("responses", "tokens", "finished_groups")
        }
        self.journal.write("start", step=trainer.global_step, resumed=found)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        run = run_of(trainer)
        groups, step = run.step_stream.groups, run.step_stream.step
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        lags = [step - version for rollout in rollouts for version in rollout.policy_versions]
        self.journal.write(
            "step",
            step=step,
            indices=[group.index for group in groups],
            prompts=[group.prompt.id for group in groups],
            lag_max=max(lags, default=0),
            failed=sum(bool(rollout.failure) for rollout in rollouts),
            reissued=run.fleet.reissued,
            **self._continued(groups),
        )
        if self.stop_file.exists():
            trainer.should_stop = True

    def _continued(self, groups: list[Group]) -> dict[str, int]:
        """Counts the responses that continue the tokens of the checkpoint, and those that do
        not."""
        pairs = [
            (begun, rollout.token_ids[: len(begun)])
            for group in groups
            for begun, rollout in zip(
                self._begun.pop(group.index, []), group.rollouts, strict=False
            )
            if begun
        ]
        kept = sum(begun == trained for begun, trained in pairs)
        return {"continued": kept, "rewritten": len(pairs) - kept}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        ledger = run_of(trainer).data.state_dict()["ledger"]
        left = [group["index"] for name in ("running", "finished") for group in ledger[name]]
        told = ("done_through", "done_ahead", "given_up", "skipped")
        self.journal.write("end", open=sorted(left), **{name: ledger[name] for name in told})


def _half_written(reason: str, episode: dict[str, Any]) -> bool:
    return not reason or episode.get("recorded") is not None


class FleetRecorder(L.Callback):
    """Writes losses and returns of generators into the journal; on its own thread, because the
    trainer may wait."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._over = threading.Event()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        fleet = run_of(trainer).fleet
        threading.Thread(target=self._watch, args=(fleet,), name="fleet watch", daemon=True).start()

    def _watch(self, fleet: Fleet) -> None:
        total = len(fleet.rollouts.generators)
        members, whole = total, True
        while not self._over.wait(LOOK_S):
            before, members = members, len(fleet.rollouts.generators)
            if members < before:
                why = fleet.rollouts.last_loss
                self.journal.write("lost", members=members, why=why[:300])
                whole = False
            elif not whole and members == total == len(fleet.rollouts.serving):
                self.journal.write("whole", reissued=fleet.reissued)
                whole = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._over.set()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._over.set()
