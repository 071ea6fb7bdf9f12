"""The requirements of a transport on machine, servers and joining generators, checked before
anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from lrl.system.endpoint import LOOPBACK

if TYPE_CHECKING:  # not torch, too, which `lrl leave` need not wait for
    from lrl.generators.settings import ServerSettings


class Machine(NamedTuple):
    """The hardware between trainer and generators."""

    on_cuda: bool
    """Both are on GPUs."""
    shares_device: bool
    """A generator has the trainer's own GPU."""
    host: str = LOOPBACK
    """Where the generators listen; if others reach it, generators may join from there."""
    ranks: int = 1
    """Processes that train."""
    adapters: bool = False
    """Adapters travel, and not the weights (`model.lora`)."""


class Requirements:
    """The requirements of a transport: by default none. A refusal is empty where there is none."""

    narrows = False
    """The weights travel in the generators' number format, where that is the smaller one."""
    middleware: tuple[str, ...] = ()
    """Class paths of the routes that its servers need besides vLLM's."""

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        """Returns why the transport cannot work on `machine`, as words after its name."""
        return ""

    @classmethod
    def server_refusal(cls, settings: ServerSettings) -> str:
        """Returns why the transport cannot work with servers of these settings, and the remedy."""
        return ""

    @classmethod
    def join_refusal(cls, same_machine: bool, host: str) -> str:
        """Returns why a generator of another process cannot join a run whose generators listen at
        `host`, as words after the run's name."""
        return ""

    @classmethod
    def server_environment(cls, number: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment variables that generator `number` needs besides inherited
        ones."""
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
    def stored_bytes(cls, weight_bytes: int, pools: int, generators: int) -> int:
        """Returns the bytes that the run's `pools` pools of `generators` together take of this
        machine's shared memory at most; `weight_bytes` are those of one copy as it travels."""
        return 0
