"""The base of a weight transport: the trainer's end of a transfer. vLLM's engine of the same name
is the other end.

A transport is one file with all that is particular to it: what it refuses, what its servers need,
how it connects and sends. When to pause, the version's name and the check of the outcome are the
same for all (`lrl.weights.sync`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # not torch, too, which `lrl leave` need not wait for
    from lrl.generators.settings import ServerSettings
    from lrl.weights.control import Control
    from lrl.weights.wire import Weights


class Machine(NamedTuple):
    """The hardware between trainer and generators."""

    on_cuda: bool
    """Both are on GPUs."""
    shares_device: bool
    """A generator has the trainer's own GPU."""
    is_open: bool = False
    """The run's generators listen where other machines reach them, so that others may join from
    there."""
    ranks: int = 1
    """Processes that train."""
    adapters: bool = False
    """Adapters travel, and not the weights (`model.lora`)."""


class Transport(ABC):
    """One way for weights to reach the generators."""

    backend: str
    """Name of vLLM's engine, of the setting `strategy.weight_transfer` and of this transport."""
    collective = False
    """All generators take part in one transfer; a change of the pool then means that all connect
    anew."""
    copies = False
    """`stage` copies the weights, so that the policy may change while they are sent."""
    fetches = False
    """The generators fetch what `stage` copied, in `distribute`."""
    narrows = False
    """The weights travel in the generators' number format, where that is the smaller one."""
    middleware: tuple[str, ...] = ()
    """Class paths of the routes that its servers need besides vLLM's."""
    attempts: tuple[bool, ...] = (False, False)
    """The attempts at a sync; true for one that uses the transport's fallback."""
    fetched_bytes = 0
    """Bytes of weights that generators fetched so far, from rank 0 and from each other."""
    sent_bytes = 0
    """Bytes of weights that rank 0 sent so far."""

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        """Returns why the transport cannot work on `machine`, as words behind its name; empty if it
        can."""
        return ""

    @classmethod
    def server_refusal(cls, settings: ServerSettings) -> str:
        """Returns why the transport cannot work with servers of these settings, and the remedy;
        empty if it can."""
        return ""

    @classmethod
    def join_refusal(cls, same_machine: bool) -> str:
        """Returns why a generator of another process cannot join by this transport; empty if it
        can."""
        return ""

    @classmethod
    def address_refusal(cls, host: str) -> str:
        """Returns why a generator of another machine cannot join a run whose `strategy.server.host`
        is `host`."""
        return ""

    @classmethod
    def server_environment(cls, number: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment variables that generator `number` needs besides those it
        inherits."""
        return {}

    @classmethod
    def common_environment(cls, own: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment variables in `own` that every process of a transfer must have
        alike, or lack."""
        return {}

    @classmethod
    def buffer_bytes(cls, largest: int) -> int:
        """Returns the bytes that a transfer takes on each GPU, of trainer and generator, when the
        largest tensor has `largest`."""
        return 0

    @classmethod
    def room_refusal(cls, weight_bytes: int, pools: int, generators: int) -> str:
        """Returns why this machine has no room for what the transport stores for the run's `pools`
        pools of `generators` together; empty if it has. `weight_bytes` are those of one copy as it
        travels."""
        return ""

    @abstractmethod
    def connect(self, control: Control, weights: Weights, name: str) -> None:
        """Joins the engines of the generators that take part, before the first sync of each.

        Args:
            control: The control plane.
            weights: The policy's weights.
            name: Of the connection, unique on this machine.
        """

    def stage(self, weights: Weights, use_fallback: bool) -> None:  # noqa: B027 - most have nothing to do ahead
        """Does what can be done while the generators still write; called right before the pause.

        Raises:
            OSError: There is no room for the weights.
        """

    def distribute(self, control: Control) -> None:  # noqa: B027
        """Brings what `stage` copied to the generators that take part, while they still write;
        `fetches` says so."""

    @abstractmethod
    def send(self, control: Control) -> None:
        """Moves the weights into paused generators: start, update, finish."""

    def close(self) -> None:  # noqa: B027
        """Releases what `connect` took; idempotent."""
