"""OpenEnv's echo environment, as `openenv init` writes it, on a server of this machine. Needs `pip
install openenv`.

It repeats a message, and gives a tenth for each letter of it, in OpenEnv 0.10 at most 1. It has no
end of its own.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

NAME = "echo_env"
START_S = 300.0


@contextlib.contextmanager
def echo_server() -> Iterator[str]:
    """Serves it until the block ends; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        # Without uv in its path it writes no lock file, for which it would ask a registry.
        openenv = str(Path(sys.executable).with_name("openenv"))
        command = [sys.executable, openenv, "init", NAME, "--output-dir", folder]
        subprocess.run(command, env=os.environ | {"PATH": ""}, stdout=2, check=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        app = [f"{NAME}.server.app:app", "--port", str(port), "--log-level", "warning"]
        server = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", *app], cwd=folder, stdout=sys.stderr
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(f"{url}/health")
            yield url
        finally:
            server.kill()
            server.wait()


def _wait(url: str) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
