"""The callbacks that no run is without; `PolicyModule.configure_callbacks` adds them."""

from __future__ import annotations

import lightning as L

from lrl.callbacks.find import find
from lrl.callbacks.last_checkpoint import LastCheckpoint
from lrl.callbacks.loggers_may_fail import LoggersMayFail


def standing(trainer: L.Trainer) -> list[L.Callback]:
    """Those of them that the trainer does not have yet."""
    return [kind() for kind in (LoggersMayFail, LastCheckpoint) if find(trainer, kind) is None]
