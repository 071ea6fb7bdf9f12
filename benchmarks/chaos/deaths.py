"""Deaths of a rank at a place in the program: it kills itself there, so nothing of it can clean
up."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PLACES: dict[str, tuple[str, str]] = {
    "load": ("lrl.training.sharding", "Sharding.fill"),
    "step": ("lrl.policy", "PolicyModule.compute_loss"),
    "sync": ("lrl.training.model", "whole_on_rank_0"),
    "save": ("lrl.checkpoints.checkpoint_folder", "save_parts"),
    "export": ("lrl.policy_model", "on_cpu"),
}
"""A function that every rank of a sharded run calls in each phase: its module and its name in
there."""


class Death(NamedTuple):
    """The end of one rank: at a call of the function of a place."""

    rank: int
    place: str
    call: int = 1

    def prepare(self, told: Path | None = None) -> None:
        """Has this process die there; it writes the time, in seconds since 1970, into the file
        `told`."""
        calls = 0

        def die() -> None:
            nonlocal calls
            calls += 1
            if calls == self.call:
                if told is not None:
                    told.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        before_each_call(*PLACES[self.place], die)


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
