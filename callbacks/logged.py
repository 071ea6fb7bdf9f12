"""Which figures of a run are new: what `Health` and `Monitors` judge."""

from __future__ import annotations

import lightning as L
from torch import Tensor


class Logged:
    """The figures that were logged since the last look."""

    def __init__(self) -> None:
        self._seen: dict[str, Tensor] = {}

    def look(self, trainer: L.Trainer) -> dict[str, Tensor]:
        """What is new in `trainer.callback_metrics`.

        Lightning goes on to show a value that a step does not log. Only a new one has memory of its own.
        """
        shown, seen = dict(trainer.callback_metrics), self._seen
        self._seen = shown
        return {tag: value for tag, value in shown.items() if tag not in seen or not value.is_set_to(seen[tag])}
