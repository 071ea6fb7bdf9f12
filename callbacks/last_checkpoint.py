"""Checkpoint of a run that ends by a signal or an error. Every run has it.

Lightning's `ModelCheckpoint(save_on_exception=True)` is not enough: a user has to think of it, it
gives up when its own folder is full, and a checkpoint from the middle of a step makes Lightning
count a batch that was never trained, so that loggers and epochs are off by one after a resume.
"""

import logging
import shlex
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.checkpoints.checkpoint_file import CheckpointFile
from lrl.checkpoints.resume import SLURM_RUN
from lrl.checkpoints.run_folder import run_folder
from lrl.errors import ConfigError, RankLostError
from lrl.system.ranks import collective, follow
from lrl.system.signals import run_of_job

log = logging.getLogger(__name__)


class LastCheckpoint(L.Callback):
    """Saves the steps since the last checkpoint when a signal or an error ends the run, and logs
    the path.

    If the run's own folder cannot be written, also at a regular end, the last checkpoint goes to
    the system's temporary folder. Nothing is saved with `enable_checkpointing: false` or
    `fast_dev_run`.
    """

    _first_step: int | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Records the first step: later ones can be saved."""
        self._first_step = trainer.global_step

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Corrects Lightning's counts in every checkpoint to whole steps, and notes the job."""
        checkpoint[SLURM_RUN] = run_of_job()
        end_of_step(checkpoint["loops"]["fit_loop"])

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Saves new whole steps, and logs the checkpoint to resume."""
        if trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        if self._first_step is None and isinstance(exception, ConfigError):
            return  # nobody has to hear of steps in a run that is refused
        try:
            rank_zero_info(self._save(trainer))
        except Exception as error:
            # e.g. a lost rank or device; the run must still be torn down and `exception` be shown.
            why = str(error).partition("\n")[0]
            log.error("The last checkpoint could not be made. %s: %s", type(error).__name__, why)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Saves elsewhere a last checkpoint that could not be written."""
        pl_module.ranks.listening = True  # the others come to `follow` below
        io = trainer.strategy.checkpoint_io
        if trainer.is_global_zero and isinstance(io, CheckpointFile) and io.refused:
            rank_zero_info(self._save(trainer))
        follow(pl_module, last=True)

    def _save(self, trainer: L.Trainer) -> str:
        io, step = trainer.strategy.checkpoint_io, trainer.global_step
        newest, newest_step = str(trainer.ckpt_path or ""), self._first_step
        if isinstance(io, CheckpointFile) and io.newest:
            newest, newest_step = io.newest, io.newest_step
        resume = f"Resume with --ckpt_path {shlex.quote(newest)}" if newest else "None is earlier."
        if self._first_step is None or (step == self._first_step and not newest):
            return "No step was trained: there is nothing to save."
        if step == newest_step:
            return f"All {step} steps are saved. {resume}"
        if not trainer.checkpoint_callbacks or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return f"After {step} steps nothing is saved: enable_checkpointing or fast_dev_run."
        if not between_steps(trainer):
            return f"The run ended within the step after {step}: no checkpoint of it. {resume}"
        if (path := save(trainer)) is None:
            return f"The state after {step} steps could not be saved anywhere. {resume}"
        return f"Saved after {step} steps. Resume with --ckpt_path {shlex.quote(path)}"


def between_steps(trainer: L.Trainer) -> bool:
    """Tells whether the weights come from whole optimizer steps."""
    loop = trainer.fit_loop.epoch_loop
    # Lightning counts the start and the end of each `optimizer.step`, and the batches whose
    # training step has ended.
    updates: Any = loop.manual_optimization.optim_step_progress.total
    batches: Any = loop.batch_progress.total
    return bool(updates.ready == updates.completed == batches.processed)


def end_of_step(fit_loop: dict[str, Any]) -> None:
    """Sets Lightning's counts in a checkpoint to whole steps."""
    progress = fit_loop["epoch_loop.batch_progress"]
    if progress["total"]["processed"] != progress["total"]["completed"]:
        return  # at the end of a step the counts are right
    # A resume would leave out an untrained batch in some only.
    for counts in (progress["total"], progress["current"]):
        counts["ready"] = counts["started"] = counts["processed"]
    epochs = fit_loop["epoch_progress"]["current"]
    # Between epochs a resume would add to it.
    if epochs["ready"] == epochs["completed"] and progress["is_last_batch"]:
        progress["current"] = dict.fromkeys(progress["current"], 0)
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] = progress["total"]["processed"]


def save(trainer: L.Trainer) -> str | None:
    """Saves into the run's folder, else a temporary one; returns the path, None if both fail."""
    configured = (getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks)
    folder = next((Path(path) for path in configured if path), run_folder(trainer) / "checkpoints")
    path = folder / f"last-step={trainer.global_step}.ckpt"
    write(trainer, path)
    io = trainer.strategy.checkpoint_io
    if not isinstance(io, CheckpointFile) or io.refused is None:
        return str(path)
    elsewhere = Path(tempfile.mkdtemp(prefix="lrl-checkpoint-")) / path.name
    write(trainer, elsewhere)
    return None if io.refused else str(elsewhere)


def write(trainer: L.Trainer, path: Path) -> None:
    """Saves as `trainer.save_checkpoint` does, but led by rank 0."""
    policy: Any = trainer.lightning_module
    sharded = policy.sharding is not None
    if sharded and not policy.ranks.listening:
        raise RankLostError("The policy is sharded, and the other ranks do not listen now.")
    try:
        dump_together(policy, path)
    except RankLostError:
        if sharded:
            raise  # the lost rank's part of the weights is lost, too
        dump(policy, path)


def dump(policy: Any, path: Path) -> None:
    """Writes a checkpoint; a collective of all ranks if the policy is sharded."""
    trainer = policy.trainer
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    trainer.strategy.save_checkpoint(checkpoint, path)


@collective
def dump_together(policy: Any, path: Path) -> None:
    dump(policy, path)
