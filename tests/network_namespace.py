"""Another network namespace, which is another machine to the network."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address

import pytest

# A network of four addresses for each process, by its pid (at most 22 bits): two sessions of tests side by side had the
# same one, and their packets went to the namespace that was made first.
NETWORK = IPv4Address("10.0.0.0") + 4 * os.getpid()
HERE, THERE = str(NETWORK + 1), str(NETWORK + 2)


@contextmanager
def network_namespace() -> Iterator[str]:
    """Yields the name of one that is reached at `THERE`, and from which this one is reached at `HERE`."""
    name = f"lrl-{uuid.uuid4().hex[:6]}"
    here, there = f"{name[4:]}h", f"{name[4:]}t"
    with ExitStack() as ends:
        try:
            _ip("netns", "add", name)
            ends.callback(_ip, "netns", "delete", name)
            _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespace can be made here, which needs root and iproute2: {error}")
        _ip("address", "add", f"{HERE}/30", "dev", here)
        _ip("link", "set", here, "up")
        for words in (["address", "add", f"{THERE}/30", "dev", there], ["link", "set", there, "up"]):
            _ip("-n", name, *words)
        _ip("-n", name, "link", "set", "lo", "up")
        yield name


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)
