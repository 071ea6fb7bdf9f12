"""The rendezvous of a job's ranks on several machines, before they have a process group.

A process group waits for its ranks without a word, does not see that one has failed, and its
barriers, `monitored_barrier` included, work only where all ranks are connected. So the ranks first
meet at rank 0's store (MASTER_ADDR, MASTER_PORT): each says where it is, rank 0 and each other one
try whether they can connect as gloo will, and who ends before they have a process group says why.
The store carries no token and no TLS.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from lrl.distributed.interface import (
    GLOO,
    chosen_interface,
    family,
    resolve,
    tell_libraries,
    with_address,
)
from lrl.distributed.keepalive import close_silent_connections
from lrl.errors import ConfigError, RendezvousError
from lrl.system.endpoint import is_loopback

log = logging.getLogger(__name__)

POLL_S = 0.2
CONNECT_S = 10.0
"""Longest wait for a connection to a machine that has been heard of."""
LOG_AFTER_S, LOG_EVERY_S = 10.0, 60.0
"""When a wait is logged."""
HEARD_S = 10.0
"""Longest wait of rank 0 for the others to leave: its store ends with it."""


class RankAddress(NamedTuple):
    """A rank's machine, the address and interface at which gloo will take connections there, and a
    port that is open during the rendezvous."""

    host: str
    address: str
    interface: str
    port: int


@dataclass
class Rendezvous:
    """The meeting of the ranks at `host`:`port`; use it as a context, whose error all ranks get."""

    host: str
    """MASTER_ADDR."""
    port: int
    """MASTER_PORT."""
    rank: int
    """This process."""
    ranks: int
    """All processes."""
    _: KW_ONLY
    of_node: int = 1
    """Processes of each node."""
    hosts: bool = False
    """Whether this process opens the store; torchrun's agent does so for its workers."""
    timeout_s: float = 600.0
    """Longest wait for the others to come, in seconds."""
    setting: str = "strategy.meeting_timeout_s"
    """What sets it."""
    silence_s: float = 30.0
    """A machine that is silent for so long is gone."""

    def __post_init__(self) -> None:
        self.store: Any = None
        """torch's store, within the context."""
        self._end = time.monotonic() + self.timeout_s

    def __enter__(self) -> Rendezvous:
        """Opens the store, or waits for it and connects.

        Raises:
            ConfigError: The store cannot be opened, or the host has no address.
            RendezvousError: Nobody has opened it in time.
        """
        if not self.hosts:
            self._wait(self._port_is_closed, self.timeout_s)
        try:
            store = dist.TCPStore(
                *(self.host, self.port, None, self.hosts, timedelta(seconds=CONNECT_S)),
                wait_for_workers=False,
                multi_tenant=True,  # the process group's own store, later, is the same server
            )
        except dist.DistError as error:
            raise ConfigError(
                f"MASTER_PORT is {self.port}, which {self._name(self.rank)} on "
                f"{socket.gethostname()} cannot use at {self.host}: {str(error).splitlines()[0]} "
                "If another process has that port, give all nodes another one."
            ) from error
        close_silent_connections(self.silence_s)
        self.store = dist.PrefixStore(name_of_job(), store)
        return self

    def __exit__(
        self, kind: Any, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tells the others of an error, unless the rendezvous is over; rank 0 leaves last."""
        if (store := self.store) is None:
            return
        self.store = None
        with suppress(dist.DistError):  # rank 0's machine is gone
            if error is not None and not store.check(["failed"]):
                failed = [self._name(self.rank), socket.gethostname(), words_of(error)]
                store.set("failed", json.dumps(failed))
            store.set(f"left/{self.rank}", "")
            if self.rank == 0:
                met = [rank for rank in range(self.ranks) if store.check([f"meeting/{rank}"])]
                end = time.monotonic() + HEARD_S
                while not store.check([f"left/{one}" for one in met]) and time.monotonic() < end:
                    time.sleep(POLL_S)

    def end(self) -> None:
        """Ends it: the ranks have a process group, which notices errors itself."""
        self.store = None

    def meet(self) -> list[RankAddress]:
        """Waits until all have come and can connect; has gloo and NCCL take the interface. Returns
        where each is.

        Raises:
            ConfigError: A variable names an interface that does not lead to the others.
            RendezvousError: Not all came in time, or one of them failed.
        """
        own = chosen_interface(self.host)
        left_s = max(0.0, self._end - time.monotonic())
        seen = self.wait_all("meeting", resolve(self.host), left_s)
        elsewhere = [address for address in seen if not is_loopback(address)]
        if is_loopback(own.address) and elsewhere and not os.environ.get(GLOO):
            # A machine's own name often leads it to itself, and others to its network.
            own = with_address(elsewhere[0]) or own
        with socket.create_server(
            ("", 0), family=family(own.address), backlog=min(self.ranks, 4096)
        ) as door:
            place = RankAddress(
                socket.gethostname(), own.address, own.name, port=door.getsockname()[1]
            )
            rows = self.wait_all("exchange of addresses", list(place), 2 * CONNECT_S)
            places = [RankAddress(*row) for row in rows]
            for rank in range(1, self.ranks) if self.rank == 0 else [0]:
                self._try(rank, places[rank], place)
            self.wait_all("trial of connections", None, 2 * CONNECT_S)
        tell_libraries(own)
        return places

    def wait_all(self, stage: str, mine: Any, timeout_s: float) -> list[Any]:
        """Says `mine`, and returns what each rank says at this stage, by rank.

        Raises:
            RendezvousError: Not all have said it in time, or one of them has failed.
        """
        store = self.store
        try:
            store.set(f"{stage}/{self.rank}", json.dumps(mine))
            if self.rank == 0:
                self._wait(partial(self._absent, store, stage), timeout_s)
                said = [store.get(f"{stage}/{rank}").decode() for rank in range(self.ranks)]
                store.set(stage, f"[{', '.join(said)}]")
            # Asking for each would be a million calls of a thousand ranks. Rank 0's own deadline
            # comes first, and names who is missing.
            self._wait(partial(self._unannounced, store, stage), timeout_s + CONNECT_S)
            found: list[Any] = json.loads(store.get(stage))
        except dist.DistError as error:
            raise RendezvousError(
                f"The connection to {self.host}:{self.port} has ended: rank 0, or its machine, is "
                "gone. Look for its error."
            ) from error
        return found

    def _wait(self, missing: Callable[[], str], timeout_s: float) -> None:
        """Waits until nothing is missing, or another rank has failed."""
        start, said_at = time.monotonic(), LOG_AFTER_S
        while what := missing():
            if self.store is not None and self.store.check(["failed"]):
                name, host, why = json.loads(self.store.get("failed"))
                raise RendezvousError(
                    f"{name.capitalize()} on {host} has ended before all had met: {why}"
                )
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise RendezvousError(
                    f"After {timeout_s:.0f} s {what}. Start lrl on every node with the same "
                    "MASTER_ADDR and MASTER_PORT, look there for an error, and check that no "
                    f"firewall closes the port; or raise {self.setting} ({self.timeout_s:.0f})."
                )
            if waited > said_at:
                log.warning("Waiting for %.0f s: %s.", waited, what)
                said_at += LOG_EVERY_S
            time.sleep(POLL_S)

    def _port_is_closed(self) -> str:
        error = failure_to_connect(resolve(self.host), self.port)
        where = f"MASTER_ADDR:MASTER_PORT, {self.host}:{self.port}"
        return f"nobody answers at {where} ({error})" if error else ""

    def _absent(self, store: dist.Store, stage: str) -> str:
        absent = [rank for rank in range(self.ranks) if not store.check([f"{stage}/{rank}"])]
        if not absent:
            return ""
        names = [self._name(rank) for rank in absent[:8]] + ["..."] * (len(absent) > 8)
        return (
            f"{self.ranks - len(absent)} of {self.ranks} ranks have come to the {stage} at "
            f"{self.host}:{self.port}; {', '.join(names)} {'has' if len(absent) == 1 else 'have'} "
            "not"
        )

    def _unannounced(self, store: dist.Store, stage: str) -> str:
        if store.check([stage]):
            return ""
        return f"rank 0 at {self.host}:{self.port} is not ready for the {stage}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} (node {rank // self.of_node})"

    def _try(self, rank: int, there: RankAddress, own: RankAddress) -> None:
        """Connects to another rank as gloo will: from this machine to a free port there."""
        if error := failure_to_connect(there.address, there.port, own.address):
            raise ConfigError(
                f"{self._name(self.rank).capitalize()} on {own.host} cannot connect from "
                f"{own.address} ({own.interface}) to {self._name(rank)} on {there.host} at "
                f"{there.address} ({there.interface}), port {there.port}: {error}. Leave {GLOO} "
                "out on both, or set it to the interface that leads to the other machines; ranks "
                "need free ports that no firewall closes between the nodes."
            )


def failure_to_connect(address: str, port: int, own: str = "") -> OSError | None:
    """Returns why no connection comes about, from an address of this machine; None if one does."""
    try:
        socket.create_connection((address, port), CONNECT_S, (own, 0)).close()
    except OSError as error:
        return error
    return None


def words_of(error: BaseException) -> str:
    """Returns why a rank ends, for the others."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "a signal has stopped it."
    known = isinstance(error, ConfigError | RendezvousError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def name_of_job() -> str:
    """Returns what tells this start of a job apart from others at the same store: torchrun's
    restarts, for one."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return "/".join(["lrl", *(os.environ.get(name, "") for name in names)])
