"""Another network namespace, which is another machine to the network."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

HERE, THERE = "10.213.77.1", "10.213.77.2"


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
        _ip("address", "add", f"{HERE}/24", "dev", here)
        _ip("link", "set", here, "up")
        for words in (["address", "add", f"{THERE}/24", "dev", there], ["link", "set", there, "up"]):
            _ip("-n", name, *words)
        _ip("-n", name, "link", "set", "lo", "up")
        yield name


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)
