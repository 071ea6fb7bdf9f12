"""What callbacks share: looking one another up, and a base for those of rank 0 alone."""

from __future__ import annotations

from typing import TypeVar

import lightning as L

Kind = TypeVar("Kind", bound=L.Callback)


def find_all(trainer: L.Trainer, kind: type[Kind]) -> list[Kind]:
    """The trainer's callbacks of one class, in their order."""
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


def find(trainer: L.Trainer, kind: type[Kind]) -> Kind | None:
    """The trainer's first callback of one class, or None."""
    return next(iter(find_all(trainer, kind)), None)


class OnRankZero(L.Callback):
    """Base of a callback that the other ranks do without (`lrl.callbacks.default_callbacks`).

    No hook may call a collective.
    """
