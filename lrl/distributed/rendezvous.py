"""The rendezvous of a job's ranks on several machines, before they have a process group.

A process group waits for its ranks without a word and does not see that one has failed. So the
ranks first meet at rank 0's store (MASTER_ADDR, MASTER_PORT): each says where it is, rank 0 and
each other one try whether they can connect as gloo will, and who ends before they have a process
group says why. The store carries no token and no TLS.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from lrl.distributed.interface import (
    GLOO,
    Interface,
    chosen_interface,
    family,
    resolve,
    tell_libraries,
    with_address,
)
from lrl.distributed.keepalive import close_silent_connections
from lrl.errors import ConfigError, RendezvousError

log = logging.getLogger(__name__)

POLL_S = 0.2
CONNECT_S = 10.0
"""Longest wait for a connection to a machine that has been heard of."""
LOG_AFTER_S, LOG_EVERY_S = 10.0, 60.0
"""When a wait is logged."""
HEARD_S = 10.0
"""Longest wait of a rank 0 that fails until the others have read its reason: its store ends with
it."""

AT = {"come": "has not seen all ranks", "ready": "has not finished its checks"}
AT_OTHERS = "waits for another rank"
"""What rank 0 does at a stage, as the others see it."""


class RankAddress(NamedTuple):
    """The machine of a rank, and how others reach it."""

    host: str
    """Name of the machine."""
    address: str
    """By which the machine reaches `master`."""
    interface: str
    """Which has this address."""
    port: int
    """Where it takes connections during the rendezvous."""
    master: str
    """The address that MASTER_ADDR has there."""


class Rendezvous:
    """The meeting of the ranks at `host`:`port`; use it as a context, whose error all ranks get.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        rank: This process.
        ranks: All processes.
        of_node: Processes of each node.
        hosts: Whether this process opens the store; torchrun's agent does so for its workers.
        timeout_s: Longest wait for the others to come, in seconds.
        setting: What sets it.
        silence_s: A machine that is silent for so long is gone.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        ranks: int,
        of_node: int = 1,
        hosts: bool = False,
        timeout_s: float = 600.0,
        setting: str = "strategy.meeting_timeout_s",
        silence_s: float = 30.0,
    ) -> None:
        self.host = host
        self.port = port
        self.rank = rank
        self.ranks = ranks
        self.of_node = of_node
        self.timeout_s = timeout_s
        self.setting = setting
        self._silence_s = silence_s
        self._hosts = hosts
        self._over = False
        self._store: dist.Store | None = None
        self._end = time.monotonic() + timeout_s

    def __enter__(self) -> Rendezvous:
        """Opens the store, or waits for it and connects.

        Raises:
            ConfigError: The port is taken, or the host has no address.
            RendezvousError: Nobody has opened it in time.
        """
        if not self._hosts:
            self._wait_for_port()
        try:
            store = dist.TCPStore(
                *(self.host, self.port, None, self._hosts, timedelta(seconds=CONNECT_S)),
                wait_for_workers=False,
                multi_tenant=True,  # the process group's own store, later, is the same server
            )
        except dist.DistError as error:
            raise self._not_opened(error) from error
        close_silent_connections(self._silence_s)
        self._store = dist.PrefixStore(name_of_job(), store)
        return self

    def __exit__(
        self, kind: Any, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Tells the others of an error, unless the rendezvous is over; rank 0 stays until all
        others are done, too."""
        with suppress(dist.DistError):
            if error is None and not self._over:
                self._let_others_hear("done", self.rank)
            elif error is not None and not self._over and not isinstance(error, RendezvousError):
                self._leave(words_of(error))
        self._store = None

    def end(self) -> None:
        """Ends it: the ranks have a process group, which notices errors itself."""
        self._over = True

    def meet(self) -> list[RankAddress]:
        """Waits until all have come and can connect; has gloo and NCCL take the interface. Returns
        where each is.

        Raises:
            ConfigError: A variable names an interface that does not lead to the others.
            RendezvousError: Not all came in time, or one of them failed.
        """
        own = chosen_interface(self.host)
        with socket.create_server(
            ("", 0), family=family(own.address), backlog=min(self.ranks, 4096)
        ) as door:
            place = RankAddress(
                socket.gethostname(),
                own.address,
                interface=own.name,
                port=door.getsockname()[1],
                master=resolve(self.host),
            )
            left = max(0.0, self._end - time.monotonic())
            places = [RankAddress(*row) for row in self.wait_all("come", list(place), left)]
            own = self._seen_from_elsewhere(own, places)
            places[self.rank] = places[self.rank]._replace(address=own.address, interface=own.name)
            if self.rank and Interface("", places[0].address).is_loopback:
                places[0] = places[0]._replace(address=place.master)
            for rank, other in enumerate(places):
                if (rank == 0) != (self.rank == 0):
                    self._try(rank, other, places[self.rank])
            used = self.wait_all("connected", [own.address, own.name], 2 * CONNECT_S)
        tell_libraries(own)
        return [
            one._replace(address=address, interface=name)
            for one, (address, name) in zip(places, used, strict=True)
        ]

    def wait_all(self, stage: str, mine: Any, timeout_s: float) -> list[Any]:
        """Says `mine`, and returns what each rank says at this stage, by rank.

        Raises:
            RendezvousError: Not all have said it in time, or one of them has ended.
        """
        try:
            self.store.set(f"{stage}/{self.rank}", json.dumps(mine))
            return (
                self._gather(stage, timeout_s)
                if self.rank == 0
                else self._await_rank_0(stage, timeout_s)
            )
        except dist.DistError as error:
            raise RendezvousError(
                f"The connection to {self.host}:{self.port} has ended: rank 0, or its machine, is "
                "gone. Look for its error."
            ) from error

    def _gather(self, stage: str, timeout_s: float) -> list[Any]:
        """Collects, on rank 0, what all say, and hands it on."""
        store, missing = self.store, set(range(self.ranks))

        def all_here() -> bool:
            missing.difference_update(
                [rank for rank in missing if store.check([f"{stage}/{rank}"])]
            )
            return not missing

        self._wait(all_here, timeout_s, lambda: self._missing(stage, missing))
        found = [json.loads(store.get(f"{stage}/{rank}")) for rank in range(self.ranks)]
        store.set(f"{stage}/all", json.dumps(found))
        return found

    def _await_rank_0(self, stage: str, timeout_s: float) -> list[Any]:
        """Waits for what rank 0 has collected. Asking for each would be a million calls of a
        thousand ranks."""
        store, everyone = self.store, f"{stage}/all"
        self._wait(
            lambda: store.check([everyone]),
            timeout_s + CONNECT_S,  # rank 0's own deadline comes first, and names who is missing
            lambda: f"rank 0, at {self.host}:{self.port}, {AT.get(stage, AT_OTHERS)}",
        )
        found: list[Any] = json.loads(store.get(everyone))
        return found

    @property
    def store(self) -> dist.Store:
        """The store, within the context."""
        assert self._store is not None, "within the context"
        return self._store

    def _wait(self, done: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
        """Waits for `done`, and sees that another rank leaves; `what` is missing."""
        start, said_at = time.monotonic(), LOG_AFTER_S
        while not done():
            if self.store.check(["left"]):
                self._raise_left()
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise self._give_up(f"After {timeout_s:.0f} s {what()}.")
            if waited > said_at:
                log.warning("Waiting for %.0f s: %s.", waited, what())
                said_at += LOG_EVERY_S
            time.sleep(POLL_S)

    def _give_up(self, reason: str) -> RendezvousError:
        error = RendezvousError(
            f"{reason} Start lrl on every node with the same MASTER_ADDR and MASTER_PORT and look "
            f"there for an error, or raise {self.setting} ({self.timeout_s:.0f})."
        )
        self._leave(str(error))
        return error

    def _missing(self, stage: str, missing: set[int]) -> str:
        names = ", ".join(self._name(rank) for rank in sorted(missing)[:8]) + (
            ", ..." if len(missing) > 8 else ""
        )
        what = "come to" if stage == "come" else f"answered ({stage}) at"
        have = "has" if len(missing) == 1 else "have"
        return (
            f"{self.ranks - len(missing)} of {self.ranks} ranks have {what} "
            f"{self.host}:{self.port}; {names} {have} not"
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} (node {rank // self.of_node})"

    def _leave(self, why: str) -> None:
        if not self.store.check(["left"]):
            self.store.set("left", json.dumps([self.rank, socket.gethostname(), why]))
        self._let_others_hear("heard", self.rank)

    def _let_others_hear(self, what: str, left: int) -> None:
        """Keeps rank 0's store open until every rank but `left` has confirmed `what`."""
        store, end = self.store, time.monotonic() + HEARD_S
        store.set(f"{what}/{self.rank}", "")
        others = [
            rank for rank in range(self.ranks) if rank != left and store.check([f"come/{rank}"])
        ]
        while (
            self.rank == 0
            and time.monotonic() < end
            and not all(store.check([f"{what}/{one}"]) for one in others)
        ):
            time.sleep(POLL_S)

    def _raise_left(self) -> None:
        rank, host, why = json.loads(self.store.get("left"))
        self._let_others_hear("heard", rank)
        raise RendezvousError(
            f"{self._name(rank).capitalize()} on {host} has ended before all had met: {why}"
        )

    def _seen_from_elsewhere(self, own: Interface, places: Sequence[RankAddress]) -> Interface:
        """Returns this rank's interface; on a machine whose own name leads to itself, the one that
        the others reach.

        Raises:
            ConfigError: It has none.
        """
        others = [place for place in places if not Interface("", place.address).is_loopback]
        if not own.is_loopback or not others:
            return own
        seen = with_address(others[0].master)
        if seen is None or os.environ.get(GLOO):
            raise ConfigError(
                f"MASTER_ADDR is {self.host!r}, which leads to {own.address} on rank 0's machine "
                f"({socket.gethostname()}): other machines do not reach that. Give an address of "
                f"that machine that all reach, or set {GLOO} there."
            )
        return seen

    def _try(self, rank: int, there: RankAddress, own: RankAddress) -> None:
        """Connects to another rank as gloo will: from this machine to a free port there."""
        try:
            with socket.create_connection((there.address, there.port), CONNECT_S, (own.address, 0)):
                pass
        except OSError as error:
            raise ConfigError(
                f"{self._name(self.rank).capitalize()} on {own.host} cannot connect from "
                f"{own.address} ({own.interface}) to {self._name(rank)} on {there.host} at "
                f"{there.address} ({there.interface}), port {there.port}: {error}. Leave {GLOO} "
                "out on both, or set it to the interface that leads to the other machines; ranks "
                "need free ports that no firewall closes between the nodes."
            ) from None

    def _wait_for_port(self) -> None:
        """Waits until somebody listens at rank 0's port."""
        start, said_at, there = time.monotonic(), LOG_AFTER_S, resolve(self.host)
        while True:
            try:
                with socket.create_connection((there, self.port), CONNECT_S):
                    return
            except OSError as error:
                reason = (
                    f"nobody answers at MASTER_ADDR:MASTER_PORT, {self.host}:{self.port} ({error})"
                )
            waited = time.monotonic() - start
            if time.monotonic() > self._end:
                raise RendezvousError(
                    f"{self._name(self.rank).capitalize()} on {socket.gethostname()}: after "
                    f"{waited:.0f} s {reason}. Look for rank 0's error; check that the address is "
                    "rank 0's machine's, that a firewall lets the port pass, and that all have the "
                    f"same port. Or raise {self.setting} ({self.timeout_s:.0f})."
                )
            if waited > said_at:
                log.warning("Waiting for %.0f s: %s.", waited, reason)
                said_at += LOG_EVERY_S
            time.sleep(POLL_S)

    def _not_opened(self, error: dist.DistError) -> Exception:
        if "EADDRINUSE" in str(error):
            return ConfigError(
                f"MASTER_PORT is {self.port}, and another process of {socket.gethostname()} has "
                "that port. Give all nodes another one."
            )
        return RendezvousError(
            f"Rank {self.rank} on {socket.gethostname()} cannot use the store at "
            f"MASTER_ADDR:MASTER_PORT, {self.host}:{self.port}: {str(error).splitlines()[0]}"
        )


def words_of(error: BaseException) -> str:
    """Returns why a rank ends, for the others."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "a signal has stopped it."
    return str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"


def name_of_job() -> str:
    """Returns what tells this start of a job apart from others at the same store: torchrun's
    restarts, for one."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return "/".join(["lrl", *(os.environ.get(name, "") for name in names)])
