"""The base of a weight transport, the trainer's end of a transfer, and which one a run takes. The
other end is vLLM's engine of the same name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lrl.errors import ConfigError
from lrl.system.endpoint import LOOPBACK, Endpoint, is_loopback

if TYPE_CHECKING:  # not torch, too, which `lrl leave` need not wait for
    from concurrent.futures import Future

    from torch import Tensor, dtype

    from lrl.generators.settings import ServerSettings
    from lrl.system.ranks import Ranks
    from lrl.weights.buckets import JoinOrder, Plan
    from lrl.weights.pool_calls import Failures, PoolCalls
    from lrl.weights.staging import Served, StageOrder
    from lrl.weights.version_file import Header


class Machine(NamedTuple):
    """The hardware between trainer and generators."""

    on_cuda: bool
    shares_device: bool
    """A generator has the trainer's own GPU."""
    host: str = LOOPBACK
    """Where the generators listen; if others reach it, generators may join from there."""
    ranks: int = 1
    """That train."""
    nodes: int = 1
    """Machines of the ranks."""


class Policy(Protocol):
    """The policy on rank 0, as its syncs know it (`lrl.policy_model`). Every call is a collective
    of all ranks."""

    @property
    def ranks(self) -> Ranks: ...

    def whole_weights(self, merged_in: dtype | None = None) -> Iterator[tuple[str, Tensor]]: ...

    def stage_weights(self, order: StageOrder) -> Header: ...

    def serve_weights(self, endpoint: Endpoint, token: str) -> list[Served]: ...

    def join_broadcast(self, pool: str, order: JoinOrder) -> tuple[Plan, Future[Any]]: ...

    def send_broadcast(self, pool: str) -> Future[None]: ...

    def end_broadcast(self, pool: str, abort: bool, deadline_s: float) -> None: ...


class Transport:
    """One way for weights to reach the generators, and its requirements: by default none."""

    backend: str
    """Name of vLLM's engine, of the setting `strategy.weight_transfer` and of this transport."""
    collective = False
    """All generators take part in one transfer; a change of the pool has all connect anew."""
    copies = False
    """`stage` copies the weights, so that the policy may change while they are sent."""
    middleware: tuple[str, ...] = ()
    """Class paths of the routes that its servers need besides vLLM's."""
    fetched_bytes = 0
    """By generators so far, from rank 0 and from each other."""
    sent_bytes = 0
    """By rank 0 so far."""

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        """Why it cannot work on `machine`, as words after its name; empty if it can."""
        return ""

    @classmethod
    def server_refusal(cls, settings: ServerSettings) -> str:
        """Why it cannot work with servers of these settings, and the remedy; empty if it can."""
        return ""

    @classmethod
    def join_refusal(cls, same_machine: bool, host: str) -> str:
        """Why a generator of another process cannot join a run whose generators are at `host`, as
        words after the run's name; empty if it can."""
        return ""

    @classmethod
    def server_environment(cls, number: int) -> dict[str, str]:
        """Variables that generator `number` of the run has instead of inherited ones."""
        return {}

    @classmethod
    def common_environment(cls, own: Mapping[str, str]) -> dict[str, str]:
        """Variables in `own` that all processes of a transfer must have alike."""
        return {}

    def __init__(self, policy: Policy, name: str) -> None:
        self.policy = policy
        self.name = name
        """Of the connection, unique on this machine."""

    def connect(self, calls: PoolCalls) -> None:
        """Joins the engines of the participants, before the first sync of each."""
        calls.init({})

    def stage(self) -> None:
        """Prepares the transfer while the generators still write; raises OSError without room."""

    def distribute(self, calls: PoolCalls) -> Failures:
        """Brings the staged copy to the participants while they still write; returns those that it
        did not reach."""
        return {}

    def send(self, calls: PoolCalls) -> None:
        """Moves the weights into paused generators, in which an update is open."""
        raise NotImplementedError

    def close(self) -> None:
        """Releases the resources of `connect`; idempotent."""


TRANSPORTS = {
    "ipc": "lrl.weights.ipc:Ipc",
    "nccl": "lrl.weights.nccl:Nccl",
    "shared_memory": "lrl.weights.shared_memory:SharedMemory",
    "pull": "lrl.weights.pull:Pull",
}
"""`auto` takes the first that works on this machine, and for joining generators if others may
join."""


def find_transport(name: str) -> type[Transport]:
    """Raises ConfigError for an unknown name."""
    if name not in TRANSPORTS:
        raise ConfigError(
            f"strategy.weight_transfer is {name!r}; choose auto, {', '.join(TRANSPORTS)}."
        )
    found: type[Transport] = resolve_name(TRANSPORTS[name])
    return found


def choose_transport(name: str, machine: Machine) -> type[Transport]:
    """Returns what `strategy.weight_transfer` stands for on `machine`; raises ConfigError if the
    name is unknown or the machine does not allow it."""
    is_auto, is_open = name == "auto", not is_loopback(machine.host)
    of_machine = TRANSPORTS if machine.on_cuda else ("shared_memory", "pull")
    for one in of_machine if is_auto else [name]:
        found = find_transport(one)
        why = found.refusal(machine)
        if not why and not (is_auto and is_open and found.join_refusal(False, machine.host)):
            return found
    advice = "" if is_auto else " Change that, or take auto."
    raise ConfigError(f"strategy.weight_transfer is {name!r}, {why}.{advice}")
