"""Writes the trained policy in Hugging Face format, which transformers and vLLM open."""

from __future__ import annotations

from pathlib import Path

import lightning as L


class Export(L.Callback):
    """Exports the policy when training ends.

    Args:
        folder: Where to; by default `policy` in the run's folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    def path(self, trainer: L.Trainer) -> Path:
        """The folder this run exports to."""
        return Path(self.folder) if self.folder else Path(trainer.log_dir or trainer.default_root_dir) / "policy"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the policy and its tokenizer."""
        pl_module.export(self.path(trainer))  # type: ignore[operator]
