"""Network namespaces, each of which is a machine of its own to the network."""

from __future__ import annotations

import ctypes
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address

import pytest

# A network of four addresses for each process, by its pid (at most 22 bits): two sessions of tests
# side by side had the same one, and their packets went to the namespace that was made first.
NETWORK = IPv4Address("10.0.0.0") + 4 * os.getpid()
HERE, THERE = str(NETWORK + 1), str(NETWORK + 2)
_CLONE_NEWNET = 0x40000000


@contextmanager
def network_namespace() -> Iterator[str]:
    """Yields the name of one that is reached at `THERE`, and from which this one is reached at
    `HERE`."""
    name = f"lrl-{uuid.uuid4().hex[:6]}"
    here, there = f"{name[4:]}h", f"{name[4:]}t"
    with ExitStack() as ends:
        with _or_skip():
            _ip("netns", "add", name)
            ends.callback(_ip, "netns", "delete", name)
            _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
            # A process or a socket that ends late keeps a deleted namespace, and with it this
            # address: a host of the next one, at the same address, was not reached for two minutes.
            ends.callback(_ip, "link", "delete", here)
        _ip("address", "add", f"{HERE}/30", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", name, "address", "add", f"{THERE}/30", "dev", there)
        _ip("-n", name, "link", "set", there, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield name


@dataclass(frozen=True)
class Machine:
    """One of two namespaces that are connected by a cable."""

    name: str
    address: str
    cable: str

    def enter(self) -> None:
        """Moves this thread, and those that it will start, into the namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        file = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        if libc.setns(file, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into {self.name}")
        os.close(file)

    def cut(self) -> None:
        """Cuts the cable."""
        _ip("-n", self.name, "link", "set", self.cable, "down")

    def mend(self) -> None:
        """Mends it."""
        _ip("-n", self.name, "link", "set", self.cable, "up")


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Yields two namespaces that reach each other and nothing else; several pairs do not meet."""
    mark = uuid.uuid4().hex[:6]
    first, second = (
        Machine(f"lrl-{mark}-{n}", f"10.213.0.{n + 1}", f"v{mark}{n}") for n in range(2)
    )
    with ExitStack() as ends:
        with _or_skip():
            for one in (first, second):
                _ip("netns", "add", one.name)
                ends.callback(_ip, "netns", "delete", one.name)
            far_end = ["peer", "name", second.cable, "netns", second.name]
            _ip("link", "add", first.cable, "netns", first.name, "type", "veth", *far_end)
        for one in (first, second):
            _ip("-n", one.name, "address", "add", f"{one.address}/24", "dev", one.cable)
            _ip("-n", one.name, "link", "set", one.cable, "up")
            _ip("-n", one.name, "link", "set", "lo", "up")
        yield first, second


@contextmanager
def _or_skip() -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a network namespace needs root and iproute2: {error}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)
