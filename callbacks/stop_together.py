"""The end of a run of several ranks, when a callback of one of them ends it."""

from __future__ import annotations

from typing import Any

import lightning as L


class StopTogether(L.Callback):
    """Sets `trainer.should_stop` on all ranks when it is set on one of them. Every run of several
    ranks has it.

    A callback of rank 0 alone (`lrl.callbacks.base.OnRankZero`) may set it. Rank 0 then ended after
    that step, and both waited for hours: the others for its next step, it for them.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Asks all ranks."""
        ranks = pl_module.ranks
        trainer.should_stop = ranks.share(any(ranks.gather(trainer.should_stop)))
