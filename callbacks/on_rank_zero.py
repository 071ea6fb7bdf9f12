"""What callbacks have in common that only rank 0 has: it alone has the fleet and the rollouts."""

from __future__ import annotations

import lightning as L


class OnRankZero(L.Callback):
    """Base of a callback that the other ranks do without (`lrl.callbacks.standing`). No hook may call a collective."""
