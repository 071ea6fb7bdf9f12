"""Discovery of a live run's generators, and requests to them, from another process.

The log in a run's folder leads to the supervisor that writes to it, the supervisor's command line
to the address, and its environment to the token, so no file has to hold any of these. The kernel
shows an environment only to the user of the process and to root.
"""

import contextlib
import http.client
import json
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lrl.errors import NotRunning
from lrl.system.auth import TOKEN_VARIABLE, bearer
from lrl.system.endpoint import Endpoint, connect, first_certificate, trust_only

DEADLINE_S = 10.0


@dataclass(frozen=True)
class Running:
    """A generator of a live run."""

    name: str
    log_path: Path
    url: str
    token: str = field(repr=False)
    certificate: str | None
    """Path of the PEM file; None without TLS."""

    def ask(self, method: str, route: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Returns status and JSON of the response to one request; raises NotRunning after
        `DEADLINE_S`."""
        trust = trust_only(first_certificate(self.certificate)) if self.certificate else None
        headers = {"Authorization": bearer(self.token), "Content-Type": "application/json"}
        with contextlib.closing(connect(self.url, trust, DEADLINE_S)) as connection:
            try:
                connection.request(method, route, json.dumps(body) if body else None, headers)
                response = connection.getresponse()
                return response.status, json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise NotRunning(
                    f"{self.name} at {self.url} does not answer ({error!r}). It may be starting: "
                    f"look at {self.log_path}, and try again when it says that the application has "
                    "started."
                ) from error


def find_generator(folder: Path, number: int) -> Running:
    """Returns generator `number` of the run with logs in `folder`; raises NotRunning if this user
    has none there."""
    found = find_generators(folder)
    if number in found:
        return found[number]
    if found:
        raise NotRunning(
            f"--generator {number}: the generators of {folder} are {sorted(found)}. Give one of "
            "these."
        )
    raise NotRunning(
        f"{folder} has no generator that is running here. Give the folder with the "
        "generator-<n>.log of a live run, as the user who started it, on the machine where it "
        "runs. An exported policy answers without a run: lrl chat "
        f"{shlex.quote(f'{folder}/policy')}"
    )


def find_generators(folder: Path) -> dict[int, Running]:
    """Returns the live generators of the run with its logs in `folder`, by number."""
    logs = {_inode(path): path for path in Path(folder).glob("generator-*.log")}
    processes = [
        process
        for process in psutil.process_iter(["cmdline", "create_time"])
        if _is_supervisor(process)
    ]
    found = {}
    # In the order of their start: a replacement overwrites the generator before it.
    for process in sorted(processes, key=lambda process: process.info["create_time"]):
        with contextlib.suppress(OSError, psutil.Error):  # it has ended, or is another user's
            if path := logs.get(_inode(Path(f"/proc/{process.pid}/fd/1"))):
                words = process.info["cmdline"]
                flags = dict(zip(words, words[1:], strict=False))
                certificate = flags.get("--ssl-certfile")
                url = Endpoint(flags["--host"], tls_cert=certificate).url(int(flags["--port"]))
                number = int(re.sub(r"\D", "", path.stem))
                found[number] = Running(
                    f"generator {number}",
                    path,
                    url=url,
                    token=process.environ()[TOKEN_VARIABLE],
                    certificate=certificate,
                )
    return found


def _is_supervisor(process: psutil.Process) -> bool:
    words = process.info["cmdline"] or []
    return any(word.endswith("generators/supervisor.py") for word in words) and "--port" in words


def _inode(path: Path) -> tuple[int, int]:
    """Returns a file's identity, the same for every path to it."""
    status = os.stat(path)
    return status.st_dev, status.st_ino
