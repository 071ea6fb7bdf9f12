"""Writes the trained policy in Hugging Face format, which transformers and vLLM open."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import lightning as L
from safetensors import SafetensorError

from lrl.callbacks.base import OnRankZero
from lrl.runtime.run_folder import run_folder

log = logging.getLogger(__name__)


class Export(OnRankZero):
    """Exports the policy when training ends.

    Args:
        folder: Where to; by default `policy` in the run's folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    def path(self, trainer: L.Trainer) -> Path:
        """The folder this run exports to."""
        return Path(self.folder) if self.folder else run_folder(trainer) / "policy"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the policy and its tokenizer; into the system's temporary folder if its own refuses them."""
        try:
            self.path(trainer).mkdir(parents=True, exist_ok=True)  # transformers only logs that it is no folder
            pl_module.export(self.path(trainer))  # type: ignore[operator]
        except (OSError, SafetensorError) as error:
            elsewhere = tempfile.mkdtemp(prefix="lrl-policy-")
            log.warning("The policy cannot be written to %s: %s. It goes to %s.", self.path(trainer), error, elsewhere)
            self.folder = elsewhere
            pl_module.export(Path(elsewhere))  # type: ignore[operator]
