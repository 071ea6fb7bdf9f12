"""Orders from outside to a target: at the next call of a function of a phase it runs a shell
command, once.

So a fault comes in the middle of a sync or of a save, which are too short to be met by looking at a
journal.
"""

from __future__ import annotations

import functools
import importlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLACES: dict[str, tuple[str, str]] = {
    "step": ("lrl.policy", "PolicyModule.compute_loss"),
    "sync": ("lrl.weights.sync", "PoolSync._update"),
    "save": ("lrl.checkpoints.checkpoint_file", "CheckpointFile.save_checkpoint"),
}
"""A function that rank 0 calls in each phase; that of a sync stands between pause and resume."""


def obey(folder: Path) -> None:
    for place, function in PLACES.items():
        before_each_call(
            *function,
            functools.partial(_carry_out, folder / f"order-{place}", folder / "carried-out"),
        )


def _carry_out(order: Path, told: Path) -> None:
    if order.exists():
        words = order.read_text()
        order.unlink()
        told.write_text(str(time.time()))
        subprocess.run(["sh", "-c", words], check=True)


def give(folder: Path, place: str, words: str) -> None:
    (folder / "carried-out").unlink(missing_ok=True)
    unfinished = folder / "unfinished-order"
    unfinished.write_text(words)
    unfinished.rename(folder / f"order-{place}")


def carried_out(folder: Path) -> float | None:
    told = folder / "carried-out"
    return float(told.read_text() or "nan") if told.exists() else None


def before_each_call(module: str, path: str, act: Callable[[], None]) -> None:
    owner: Any = importlib.import_module(module)
    *inner, name = path.split(".")
    for part in inner:
        owner = getattr(owner, part)
    function = getattr(owner, name)

    @functools.wraps(function)
    def acting(*args: Any, **settings: Any) -> Any:
        act()
        return function(*args, **settings)

    setattr(owner, name, acting)
