"""What a data module finds around it in a run: the trainer, the policy, the generators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L

from lrl.generators.fleet import Fleet

if TYPE_CHECKING:
    from lrl.policy import PolicyModule


class Attached(L.LightningDataModule):
    """A data module that belongs to a trainer; asking for what is not there raises RuntimeError with the remedy."""

    @property
    def fleet(self) -> Fleet:
        """The run's generators."""
        if self._strategy.fleet is None:
            raise RuntimeError("There are no generators: use lrl.AsyncSingleDevice as the trainer's strategy.")
        return self._strategy.fleet

    @property
    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError("RolloutDataModule is used by a Trainer: call trainer.fit(module, data).")
        return self.trainer

    @property
    def _strategy(self) -> Any:
        return self._trainer.strategy

    @property
    def _policy(self) -> PolicyModule:
        return self._trainer.lightning_module  # type: ignore[return-value]
