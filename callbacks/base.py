"""The base of lrl's callbacks, which run on rank 0 alone, and what several of them share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import lightning as L
from torch import Tensor

from lrl.errors import ConfigError
from lrl.system.ranks import follow

if TYPE_CHECKING:
    from lrl.run import Run

Kind = TypeVar("Kind", bound=L.Callback)


class OnRankZero(L.Callback):
    """Base of a callback that runs on rank 0 alone (`default_callbacks`).

    Within `on_train_start`, `on_train_batch_end` and `on_train_end` it may read the policy's weights
    through `pl_module`: the other ranks follow. It calls no other collective.
    """

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Tears down, which Lightning does not do after an error."""
        self.teardown(trainer, pl_module, "")


class FollowRankZero(L.Callback):
    """Has the other ranks obey rank 0's commands while rank 0 runs callbacks that it alone has.

    It follows those callbacks on rank 0, and takes their place on the others.

    Args:
        last: Whether rank 0 has no further such callbacks after these.
    """

    def __init__(self, last: bool = False) -> None:
        self.last = last

    def on_train_start(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        follow(pl_module, self.last)

    on_train_batch_end = on_train_end = on_train_start  # type: ignore[assignment]


def run_of(trainer: L.Trainer) -> Run:
    """Returns the run of a trainer; raises ConfigError if its data is no `lrl.RolloutDataModule`."""
    run: Run | None = getattr(trainer.datamodule, "run", None)  # type: ignore[attr-defined]
    if run is None:
        raise ConfigError(
            "The data is no lrl.RolloutDataModule: call trainer.fit(policy, data) with one, which has "
            "the generators write rollouts."
        )
    return run


def find_all(trainer: L.Trainer, kind: type[Kind]) -> list[Kind]:
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


def find(trainer: L.Trainer, kind: type[Kind]) -> Kind | None:
    return next(iter(find_all(trainer, kind)), None)


class NewMetrics:
    """Metrics that were logged since the last `read`."""

    def __init__(self) -> None:
        self._seen: dict[str, Tensor] = {}

    def read(self, trainer: L.Trainer) -> dict[str, Tensor]:
        seen = self._seen
        self._seen = shown = dict(trainer.callback_metrics)
        # Lightning keeps showing the value of a metric that a step does not log; only a new value
        # has its own memory.
        return {
            tag: value
            for tag, value in shown.items()
            if tag not in seen or not value.is_set_to(seen[tag])
        }


class NonzeroCounts:
    """Counts of rare events: each is logged from its first nonzero value on, then every step, so a
    chart that exists shows something and has no gaps."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def to_log(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Returns the counts that were not zero in this step or one before."""
        self._seen |= {tag for tag, count in counts.items() if count}
        return {tag: float(count) for tag, count in counts.items() if tag in self._seen}
