"""Ranks on several machines: how they meet before they have a process group, connections that notice
a lost machine, and files that all must see.

A process group waits for its ranks without a word. So the ranks first meet at torch's store on rank
0 (MASTER_ADDR, MASTER_PORT), and who is missing is named. When rank 0 ends, so does its store, and
with it the wait of the others.
"""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

from lrl.errors import ConfigError, RendezvousError
from lrl.system.endpoint import is_loopback
from lrl.system.ranks import Ranks

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
ANY_PORT = 9
POLL_S = 0.2
ANSWER_S = 10.0
"""Longest wait for an answer of the store, and how much longer others wait than rank 0, whose error
names the missing."""
PROBES = 4
"""Probes without an answer that close a connection."""
SEEN_S = 5.0
"""Longest wait until a file that rank 0 has written is seen on another machine."""


def meet(
    host: str,
    port: int,
    *,
    rank: int,
    ranks: int,
    of_node: int,
    hosts: bool,
    timeout_s: float,
    silence_s: float,
) -> dist.Store:
    """Waits until all ranks have come; has gloo and NCCL take the interface that leads to them.

    Args:
        host, port: MASTER_ADDR and MASTER_PORT.
        rank: This process.
        ranks, of_node: All processes, and those of each node.
        hosts: Whether this process opens the store; torchrun's agent does so for its workers.
        timeout_s: Longest wait for the others; RendezvousError names those that have not come.
        silence_s: A machine that is silent for so long is gone.

    Returns:
        The store, which rank 0 keeps until all are connected.
    """
    try:
        store: dist.Store = dist.TCPStore(
            *(host, port, None, hosts, timedelta(seconds=timeout_s)),
            wait_for_workers=False,
            multi_tenant=True,  # the process group's own store, later, is the same server
        )
        store.set_timeout(timedelta(seconds=ANSWER_S))
        # torchrun's agent keeps the keys of the workers that it has started before.
        store = dist.PrefixStore(f"lrl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        close_silent_connections(silence_s)
        found = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)
        address = str(found[0][4][0])
        if not is_loopback(address):
            # A machine's own name often leads it to itself, and others to its network.
            store.set("address", address)
        _wait_for_all(store, rank, ranks, of_node=of_node, timeout_s=timeout_s)
        if store.check(["address"]):
            address = store.get("address").decode()
    except dist.DistError as error:
        raise RendezvousError(
            f"MASTER_ADDR is {host} and MASTER_PORT {port}: {str(error).splitlines()[0]} Start rank "
            "0 there, or look for its error."
        ) from error
    take_interface(address)
    return store


def _wait_for_all(store: dist.Store, rank: int, ranks: int, of_node: int, timeout_s: float) -> None:
    # Rank 0 looks for all and tells them: a thousand ranks would ask a million times.
    leads = rank == 0
    keys = [f"rank/{one}" for one in range(ranks)] if leads else ["all"]
    store.set(f"rank/{rank}", "")
    end = time.monotonic() + timeout_s + (0 if leads else ANSWER_S)
    while missing := [at for at, key in enumerate(keys) if not store.check([key])]:
        if time.monotonic() > end:
            names = [f"rank {one} (node {one // of_node})" for one in missing[:8]]
            raise RendezvousError(
                f"After {timeout_s:.0f} s {', '.join(names)}{' and more' * (len(missing) > 8)} has "
                "not come. Start lrl on every node with the same MASTER_ADDR and MASTER_PORT, look "
                "there for an error, or raise strategy.meeting_timeout_s."
            )
        time.sleep(POLL_S)
    if leads:
        store.set("all", "")


def close_silent_connections(silence_s: float) -> None:
    """Has the kernel close each TCP connection that this process now has, if its other end is
    silent for `silence_s`.

    A process that ends closes its connections. A machine that loses its power or its network closes
    nothing: a wait for it would last until its timeout. The kernel of the other machine answers the
    probes, so a process may be busy as long as it likes.
    """
    pause = max(1, round(silence_s / (PROBES + 1)))
    options = {
        socket.TCP_KEEPIDLE: pause,
        socket.TCP_KEEPINTVL: pause,
        socket.TCP_KEEPCNT: PROBES,
        socket.TCP_USER_TIMEOUT: round(silence_s * 1000),  # for what was sent
    }
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            # The same connection, whose owner is a library.
            with socket.socket(fileno=os.dup(connection.fd)) as end:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in options.items():
                    end.setsockopt(socket.IPPROTO_TCP, option, value)


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


def check_writes(ranks: Ranks, folders: Sequence[Path]) -> None:
    """Checks that all ranks see the folders of rank 0 into which each writes its part of a
    checkpoint; raises ConfigError on all if one does not."""
    marks = [folder.absolute() / f".lrl-{secrets.token_hex(4)}" for folder in folders]
    for mark in marks:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    remedy = (
        "Put checkpoints on a file system that all nodes have (ModelCheckpoint.dirpath), or set "
        "strategy.save_distributed_checkpoint to false: rank 0 then writes one file."
    )
    try:
        check_seen(ranks, marks, remedy)
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def check_seen(ranks: Ranks, paths: Sequence[Path], remedy: str) -> None:
    """Checks that all ranks see what rank 0 sees at its `paths`; raises ConfigError on all if one
    does not."""
    wanted = ranks.share([(path, _size(path)) for path in paths])
    end = time.monotonic() + SEEN_S
    while (
        unseen := [path for path, size in wanted if _size(path) != size]
    ) and time.monotonic() < end:
        time.sleep(POLL_S)
    faults = [
        f"rank {rank} on {host} does not see {str(path)!r}, or another one there"
        for rank, (host, theirs) in enumerate(ranks.gather((socket.gethostname(), unseen)))
        for path in theirs
    ]
    if lost := ranks.share("; ".join(faults[:3])):
        raise ConfigError(f"{lost}. {remedy}")


def _size(path: Path) -> int:
    """Returns the bytes of a file, 0 of a folder; -1 without one."""
    if not path.exists():
        return -1
    return path.stat().st_size if path.is_file() else 0
