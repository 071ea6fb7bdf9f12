"""What a data module finds around it in a run: the trainer, the policy, the generators."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lrl.generators.fleet import Fleet
from lrl.preflight.last import check_best, newest_checkpoint
from lrl.stopwatch import Stopwatch
from lrl.strategy import stop_if_told

if TYPE_CHECKING:
    from lrl.callbacks.weight_sync import WeightSync
    from lrl.policy import PolicyModule


T = TypeVar("T")


class Attached(L.LightningDataModule):
    """A data module that belongs to a trainer; asking for what is not there raises RuntimeError with the remedy."""

    def __init__(self) -> None:
        self._attached_to: L.Trainer | None = None
        super().__init__()
        self.stopwatch = Stopwatch()
        """What the trainer does at this moment (`lrl.stopwatch.TRAINER`)."""
        self.resumes_from: str | None = None
        """The checkpoint the run goes on from; known when the run is checked."""

    @property
    def trainer(self) -> L.Trainer | None:
        """The trainer of the run; setting it is the last thing Lightning does before it looks for a checkpoint."""
        return self._attached_to

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        self._attached_to = trainer
        if isinstance(trainer, L.Trainer):
            connector: Any = trainer._checkpoint_connector
            connector._parse_ckpt_path = partial(self._find_checkpoint, trainer)

    def _find_checkpoint(self, trainer: L.Trainer, verb: TrainerFn, ckpt_path: Any, **how: bool) -> Any:
        """Lightning's own search, but for `last` (`lrl.preflight.last`); the checks hear what it has found."""
        check_best(trainer, ckpt_path)
        connector: Any = trainer._checkpoint_connector
        lightnings = type(connector)._parse_ckpt_path
        found = newest_checkpoint(trainer) if ckpt_path == "last" else lightnings(connector, verb, ckpt_path, **how)
        self.resumes_from = None if found is None else str(found)
        return found

    @property
    def fleet(self) -> Fleet:
        """The run's generators."""
        if self._strategy.fleet is None:
            raise RuntimeError(
                "There are no generators: only rank 0 has them, and the trainer's strategy must be "
                "lrl.AsyncSingleDevice or lrl.AsyncDDP."
            )
        return self._strategy.fleet

    @property
    def trains(self) -> bool:
        """Whether the run is to train, as far as it is known: without a trainer, yes."""
        return self.trainer is None or self.trainer.state.fn == "fit"

    def val_dataloader(self) -> Sequence[Any]:
        """One item per `lrl.callbacks.Evaluation`; none within fit, where they run beside the training."""
        from lrl.callbacks.evaluation import Evaluation
        from lrl.callbacks.find import find_all

        if self._trainer.state.fn == "fit":
            return []
        # Not a list: Lightning takes what a list holds, however deeply, for loaders.
        return UserList(find_all(self._trainer, Evaluation))

    def decode(self, token_ids: list[int]) -> str:
        """Text of an answer, special tokens left out."""
        return self._policy.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _on_the_loop(self, read: Callable[[], T], what: str) -> T:
        """What `read` returns, called where no task writes meanwhile: on the fleet's loop, or here when that has ended.

        Raises:
            TimeoutError: The loop did not get to it in time; names `what`.
        """
        fleet = self._strategy.fleet
        if fleet is None or fleet.loop.closed:
            return read()

        async def on_the_loop() -> T:
            return read()

        return fleet.call(on_the_loop(), what)

    def look(self) -> None:
        """What a waiting trainer does a few times a second: end if told to, and take in generators that came back."""
        stop_if_told(self._trainer)
        if (sync := self._weight_sync) is not None:
            sync.tend(self._trainer)

    def _wait_for_proof(self) -> None:
        """Wait until all that is written is by weights that are proved: nothing else is saved."""
        fleet = None if self.trainer is None else self._strategy.fleet
        if fleet is not None and (sync := self._weight_sync) is not None:
            sync.wait_for_proof(self._trainer, fleet.rollouts)

    @property
    def _weight_sync(self) -> WeightSync | None:
        from lrl.callbacks.find import find
        from lrl.callbacks.weight_sync import WeightSync

        return find(self._trainer, WeightSync)

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
