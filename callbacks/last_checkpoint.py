"""The checkpoint of a run that does not end well. Every run has it, whoever builds its Trainer.

Lightning's `ModelCheckpoint(save_on_exception=True)` does not do: a user has to think of it, it gives up when its own
folder is full, and a checkpoint from the middle of a step makes Lightning count a batch that was never trained, so that
loggers and epochs are off by one after a resume.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.runtime.checkpoint_file import CheckpointFile
from lrl.runtime.run_folder import run_folder

log = logging.getLogger(__name__)


class LastCheckpoint(L.Callback):
    """Saves what a run has learnt since its last checkpoint when a signal or an error ends it, and says where.

    When the run's own folder refuses the last checkpoint, also that of a run which ends well, the system's temporary
    folder takes it. Nothing is saved with `enable_checkpointing: false` or `fast_dev_run`.
    """

    def __init__(self) -> None:
        self._first_step: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on there may be something to save."""
        self._first_step = trainer.global_step

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Make every checkpoint one of a whole step."""
        end_of_step(checkpoint["loops"]["fit_loop"])

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save if there is something new and it can be trusted; say what to resume from."""
        if trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        try:
            rank_zero_info(self._save_and_say(trainer))
        except Exception:  # of a lost device, say; the run must still be torn down, and `exception` be the one to see
            log.exception("The last checkpoint could not be made.")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find another place for a last checkpoint that was refused."""
        io = trainer.strategy.checkpoint_io
        if isinstance(io, CheckpointFile) and io.refused:
            rank_zero_info(self._save_and_say(trainer))

    def _save_and_say(self, trainer: L.Trainer) -> str:
        io, step = trainer.strategy.checkpoint_io, trainer.global_step
        newest, newest_step = str(trainer.ckpt_path or ""), self._first_step
        if isinstance(io, CheckpointFile) and io.newest:
            newest, newest_step = io.newest, io.newest_step
        if self._first_step is None or (step == self._first_step and not newest):
            return "No step was trained: there is nothing to save."
        if step == newest_step:
            return f"All {step} steps are saved. Resume with --ckpt_path {newest}"
        if not trainer.checkpoint_callbacks or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return f"After {step} steps nothing is saved: checkpoints are off (enable_checkpointing or fast_dev_run)."
        before = f"resume with --ckpt_path {newest}" if newest else "there is no earlier checkpoint"
        if not between_steps(trainer):
            return f"The run ended within the optimizer step after {step}, so its state is not saved; {before}."
        path = save(trainer)
        if path is None:
            return f"The state after {step} steps could not be saved anywhere; {before}."
        return f"Saved after {step} steps. Resume with --ckpt_path {path}"


def between_steps(trainer: L.Trainer) -> bool:
    """Whether the weights are those of whole optimizer steps.

    Lightning counts the start and the end of each `optimizer.step`, and the batches whose training step has ended.
    """
    loop = trainer.fit_loop.epoch_loop
    updates: Any = loop.manual_optimization.optim_step_progress.total
    batches: Any = loop.batch_progress.total
    return bool(updates.ready == updates.completed == batches.processed)


def end_of_step(fit_loop: dict[str, Any]) -> None:
    """Make Lightning's counts in a checkpoint those of whole steps.

    A batch that was begun and not trained is taken out: a resume would do so in a part of them only. Between two epochs
    the count within the epoch is set back: a resume would go on with it. At the end of a step (`processed` ahead of
    `completed`) they are right as they are.
    """
    progress = fit_loop["epoch_loop.batch_progress"]
    if progress["total"]["processed"] != progress["total"]["completed"]:
        return
    for counts in (progress["total"], progress["current"]):
        counts["ready"] = counts["started"] = counts["processed"]
    epochs = fit_loop["epoch_progress"]["current"]
    if epochs["ready"] == epochs["completed"] and progress["is_last_batch"]:
        progress["current"] = dict.fromkeys(progress["current"], 0)
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = progress["total"]["processed"]


def save(trainer: L.Trainer) -> str | None:
    """Save into the run's folder, or, if it refuses, into the temporary one. Returns the path, or None."""
    name = f"last-step={trainer.global_step}.ckpt"
    path = folder(trainer) / name
    write(trainer, path)
    io = trainer.strategy.checkpoint_io
    if not isinstance(io, CheckpointFile) or io.refused is None:
        return str(path)
    elsewhere = Path(tempfile.mkdtemp(prefix="lrl-checkpoint-")) / name
    write(trainer, elsewhere)
    return None if io.refused else str(elsewhere)


def write(trainer: L.Trainer, path: Path) -> None:
    """What `trainer.save_checkpoint` does, but without waiting for the other ranks: this one may be alone."""
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    trainer.strategy.save_checkpoint(checkpoint, path)


def folder(trainer: L.Trainer) -> Path:
    """Where the run keeps its checkpoints."""
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "dirpath", None):
            return Path(callback.dirpath)  # type: ignore[attr-defined]
    return run_folder(trainer) / "checkpoints"
