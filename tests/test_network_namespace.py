"""The namespaces of the tests do not stand in one another's way."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from tests.leftovers import wait_for
from tests.network_namespace import HERE, network_namespace


def test_a_process_that_outlives_its_namespace_does_not_hide_the_next_one() -> None:
    with network_namespace() as first:
        late = subprocess.Popen(["ip", "netns", "exec", first, "sleep", "60"])
        wait_for(
            lambda: Path(f"/proc/{late.pid}/comm").read_text() == "sleep\n",
            60.0,
            "a process in the namespace",
        )
    try:
        with network_namespace() as second, socket.create_server((HERE, 0)) as server:
            connect = f"exec 3<>/dev/tcp/{HERE}/{server.getsockname()[1]}"
            words = ["ip", "netns", "exec", second, "bash", "-c", connect]
            assert subprocess.run(words, timeout=30).returncode == 0
    finally:
        late.kill()
        late.wait()
