"""Export of the trained policy in Hugging Face format, which transformers and vLLM open."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
from safetensors import SafetensorError

from lrl.callbacks.base import OnRankZero
from lrl.checkpoints.run_folder import run_folder
from lrl.rollouts import prompt_form

log = logging.getLogger(__name__)


class Export(OnRankZero):
    """Exports the policy when training ends.

    Args:
        folder: Target; by default `policy` in the run's folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    def path(self, trainer: L.Trainer) -> Path:
        """Returns the folder this run exports to."""
        return Path(self.folder) if self.folder else run_folder(trainer) / "policy"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the policy and its tokenizer, into the system's temporary folder if this one
        cannot be written."""
        path = self.path(trainer)
        try:
            path.mkdir(parents=True, exist_ok=True)  # transformers only logs that it is no folder
            self._export(trainer, pl_module, path)
        except (OSError, SafetensorError) as error:
            self.folder = tempfile.mkdtemp(prefix="lrl-policy-")
            log.warning(
                "The policy cannot be written to %s: %s. It goes to %s.", path, error, self.folder
            )
            self._export(trainer, pl_module, Path(self.folder))

    def _export(self, trainer: L.Trainer, pl_module: Any, folder: Path) -> None:
        pl_module.export(folder)
        prompt_form.save(prompt_form.of(trainer.datamodule), folder)  # type: ignore[attr-defined]
