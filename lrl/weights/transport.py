"""The base of a weight transport: the trainer's end of a transfer. vLLM's engine of the same name
is the other end.

A transport is one file with all that is particular to it. When to pause, the version's name and the
check of the outcome are the same for all (`lrl.weights.sync`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from lrl.weights.requirements import Requirements

if TYPE_CHECKING:  # not torch, too, which `lrl leave` need not wait for
    from lrl.weights.group_calls import Failures, GeneratorGroupCalls
    from lrl.weights.wire import Weights


class Transport(Requirements, ABC):
    """One way for weights to reach the generators."""

    backend: str
    """Name of vLLM's engine, of the setting `strategy.weight_transfer` and of this transport."""
    collective = False
    """All generators take part in one transfer; a change of the pool has all connect anew."""
    copies = False
    """`stage` copies the weights, so that the policy may change while they are sent."""
    fetches = False
    """The generators fetch what `stage` copied, in `distribute`."""
    attempts = 2
    """Attempts at a sync; `stage` has the fallback at the last."""
    fetched_bytes = 0
    """Bytes of weights that generators fetched so far, from rank 0 and from each other."""
    sent_bytes = 0
    """Bytes of weights that rank 0 sent so far."""

    @abstractmethod
    def connect(self, calls: GeneratorGroupCalls, weights: Weights, name: str) -> None:
        """Joins the engines of the participants, before the first sync of each; `name` is unique on
        this machine."""

    def stage(self, weights: Weights, use_fallback: bool) -> None:  # noqa: B027 - most have nothing to do ahead
        """Prepares the transfer while the generators still write; raises OSError without room."""

    def distribute(self, calls: GeneratorGroupCalls) -> Failures:
        """Brings the staged copy to the participants while they still write; returns the generators
        that it did not reach."""
        return {}

    @abstractmethod
    def send(self, calls: GeneratorGroupCalls) -> None:
        """Moves the weights into paused generators: start, update, finish."""

    def close(self) -> None:  # noqa: B027
        """Releases the resources of `connect`; idempotent."""
