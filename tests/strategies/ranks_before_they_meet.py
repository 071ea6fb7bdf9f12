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

import lrl
from tests.run_without_generators import trainer

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
    how = (2, "auto") if plain else (4, Telling(folder))
    running = trainer(Path(folder), accelerator="cpu", devices=how[0], strategy=how[1])
    rows = [{"prompt": f"{n}+1="} for n in range(10, 50)]
    data = lrl.RolloutDataModule(rows, ["tests.odd_lengths:brevity"])
    try:
        running.fit(SlowOnRankZero(policy), data)
    finally:
        print("is a rank of another process:", "LOCAL_RANK" in os.environ)
