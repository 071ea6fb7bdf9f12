"""The rendezvous of a job's ranks on several machines, before they have a process group.

A process group waits for its ranks without a word. So the ranks first meet at rank 0's store
(MASTER_ADDR, MASTER_PORT), and who is missing is named. When rank 0 ends, so does its store, and
with it the wait of the others.
"""

import logging
import os
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta

import psutil
import torch.distributed as dist

from lrl.distributed.keepalive import close_silent_connections
from lrl.errors import RendezvousError
from lrl.system.endpoint import is_loopback

log = logging.getLogger(__name__)

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
ANY_PORT = 9
POLL_S = 0.2
CONNECT_S = 10.0
LOG_AFTER_S, LOG_EVERY_S = 10.0, 60.0
"""When a wait is logged."""


@dataclass
class Rendezvous:
    """The meeting of the ranks; as long as this object lives, so does rank 0's store.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        rank: This process.
        ranks: All processes.
        of_node: Processes of each node.
        hosts: Whether this process opens the store; torchrun's agent does so for its workers.
        timeout_s: Longest wait for the others, in seconds.
        silence_s: A machine that is silent for so long is gone.
    """

    host: str
    port: int
    rank: int
    ranks: int
    of_node: int
    hosts: bool
    timeout_s: float
    silence_s: float
    _store: dist.Store = field(init=False)

    def meet(self) -> None:
        """Waits until all ranks have come; has gloo and NCCL take the interface that leads to them.

        Raises:
            RendezvousError: Names the ranks that have not come within `timeout_s`.
        """
        # torchrun's agent keeps the keys of the workers that it has started before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"lrl/{attempt}", self._open_store())
        close_silent_connections(self.silence_s)
        found = socket.getaddrinfo(self.host, ANY_PORT, type=socket.SOCK_DGRAM)
        address = str(found[0][4][0])
        if not is_loopback(address):
            # A machine's own name often leads it to itself, and others to its network.
            self._store.set("address", address)
        self.wait_all("meeting", self.timeout_s)
        if self._store.check(["address"]):
            address = self._store.get("address").decode()
        take_interface(address)

    def wait_all(self, stage: str, timeout_s: float) -> None:
        """Waits until all ranks have come to a stage.

        Raises:
            RendezvousError: Not all have come in time, or rank 0 is gone.
        """
        # Rank 0 looks for all and tells them: a thousand ranks would ask a million times. Its own
        # deadline comes first.
        leads = self.rank == 0
        keys = [f"{stage}/{rank}" for rank in range(self.ranks)] if leads else [stage]
        end = time.monotonic() + timeout_s + (0 if leads else CONNECT_S)
        log_at = time.monotonic() + LOG_AFTER_S
        try:
            self._store.set(f"{stage}/{self.rank}", "")
            while missing := [at for at, key in enumerate(keys) if not self._store.check([key])]:
                names = [f"rank {rank} (node {rank // self.of_node})" for rank in missing[:8]]
                who = f"{', '.join(names)}{' and more' * (len(missing) > 8)}"
                where = f"the {stage} at {self.host}:{self.port}"
                if time.monotonic() > end:
                    raise RendezvousError(
                        f"After {timeout_s:.0f} s {who} has not come to {where}. Start lrl on every "
                        "node with the same MASTER_ADDR and MASTER_PORT, look there for an error, "
                        "or raise strategy.meeting_timeout_s."
                    )
                if time.monotonic() > log_at:
                    log.warning("Waiting for %s at %s.", who, where)
                    log_at += LOG_EVERY_S
                time.sleep(POLL_S)
            if leads:
                self._store.set(stage, "")
        except dist.DistError as error:
            raise RendezvousError(
                f"The connection to {self.host}:{self.port} has ended: rank 0, or its machine, is "
                "gone. Look for its error."
            ) from error

    def _open_store(self) -> dist.Store:
        """Opens the store on rank 0; elsewhere waits until it is open, and connects."""
        end = time.monotonic() + self.timeout_s
        while not self.hosts:
            try:
                socket.create_connection((self.host, self.port), CONNECT_S).close()
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise RendezvousError(
                        f"After {self.timeout_s:.0f} s nobody answers at MASTER_ADDR:MASTER_PORT, "
                        f"{self.host}:{self.port} ({error}). Start rank 0 there."
                    ) from error
                time.sleep(POLL_S)
        try:
            return dist.TCPStore(
                *(self.host, self.port, None, self.hosts, timedelta(seconds=CONNECT_S)),
                wait_for_workers=False,
                multi_tenant=True,  # the process group's own store, later, is the same server
            )
        except dist.DistError as error:
            raise RendezvousError(
                f"MASTER_PORT is {self.port}: {str(error).splitlines()[0]}"
            ) from error


def take_interface(address: str) -> None:
    """Has gloo and NCCL take the interface that leads to an address, unless the user has set one.

    Left to itself gloo takes the address of the machine's name. That is often 127.0.0.1: then a rank
    of another machine connects to itself, fails, and rank 0 waits for it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, ANY_PORT))  # sends nothing: the kernel only chooses the way
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own in [one.address.partition("%")[0] for one in addresses]:
            os.environ.setdefault(GLOO, name)
            os.environ.setdefault(NCCL, f"={name}")  # without the sign eth1 would also be eth10
