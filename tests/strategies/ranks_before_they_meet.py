"""Ranks that wait for a rank 0 which does not come: it stands still in its checks, for
`tests.program`.

Arguments: policy folder, folder, strategy. The other ranks of `lrl.AsyncDDP` tell by a file that
they are within torch's wait.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L

import lrl

IN_TORCH = "_create_c10d_store"
"""The last frame of Python's in which a rank waits for the others."""


class Telling(lrl.AsyncDDP):
    """Tells when it waits, by a file of this folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def setup_distributed(self) -> None:
        waiting = threading.Thread(
            target=tell, args=(self.folder / f"{os.getpid()}.waits",), daemon=True
        )
        waiting.start()
        super().setup_distributed()


def tell(file: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None
    while sys._current_frames()[main].f_code.co_name != IN_TORCH:
        time.sleep(0.01)
    file.touch()


class SlowOnRankZero(lrl.PolicyModule):
    def configure_callbacks(self) -> Any:
        if self.trainer.is_global_zero and isinstance(self.trainer.strategy, lrl.AsyncDDP):
            time.sleep(600)
        return super().configure_callbacks()


def main(policy: str, folder: str, strategy: str) -> None:
    plain = strategy == "auto"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2 if plain else 4,
        strategy="auto" if plain else Telling(folder),
        max_steps=1,
        max_epochs=-1,
        logger=False,
        default_root_dir=folder,
    )
    rows = [{"prompt": f"{n}+1="} for n in range(10, 50)]
    try:
        trainer.fit(
            SlowOnRankZero(policy), lrl.RolloutDataModule(rows, ["tests.odd_lengths:brevity"])
        )
    finally:
        print("is a rank of another process:", "LOCAL_RANK" in os.environ)
