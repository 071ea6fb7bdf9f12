"""A module that logs what a test says, on a real Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lrl.callbacks.default_callbacks import Monitors, default_callbacks
from tests.run_without_generators import trainer

Metrics = dict[str, float]


class Scripted(L.LightningModule):
    """Logs one row of metrics each step, and learns nothing."""

    def __init__(self, rows: Sequence[Metrics]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rows = rows
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def configure_callbacks(self) -> list[L.Callback]:
        """Those of a policy that need no weights of it."""
        return [one for one in default_callbacks(self.trainer) if isinstance(one, Monitors)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict(self.rows[self.global_step], on_step=True, on_epoch=False, batch_size=1)
        self.optimizers().step()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(
    rows: Sequence[Metrics], *callbacks: L.Callback, data: Any = None, **settings: Any
) -> L.Trainer:
    """Runs a step for each row."""
    settings = {"max_steps": len(rows), "enable_checkpointing": False} | settings
    running = trainer(Path(), *callbacks, **settings)
    loader: Any = torch.utils.data.DataLoader(range(1000))  # type: ignore[arg-type]
    running.fit(Scripted(rows), datamodule=data, train_dataloaders=None if data else loader)
    return running
