"""Finds the generators of a run that is going on, and asks them something, from a process that is not the run's.

What a supervisor writes goes to its generator's log, and the kernel knows it: so the log in a run's folder leads to the
process, its command line to the address, its environment to the token. No file has to hold any of it. The kernel shows
an environment to the user who runs the process and to root, to nobody else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lrl.generators.auth import TOKEN_VARIABLE, bearer
from lrl.generators.endpoint import Listening, connect, trust_only

DEADLINE_S = 10.0


class NotRunning(RuntimeError):
    """There is no such generator, or it does not answer; the message has the remedy."""


@dataclass(frozen=True)
class Running:
    """A generator of a run that is going on."""

    name: str
    log_path: Path
    url: str
    token: str = field(repr=False)
    certificate: str | None
    """Path of the PEM file; None without TLS."""

    def ask(self, method: str, route: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON of the response to one request; raises NotRunning if there is none within `DEADLINE_S`."""
        connection = connect(self.url, trust_only(self.certificate) if self.certificate else None, DEADLINE_S)
        headers = {"Authorization": bearer(self.token), "Content-Type": "application/json"}
        with contextlib.closing(connection):
            try:
                connection.request(method, route, json.dumps(body) if body else None, headers)
                response = connection.getresponse()
                return response.status, json.loads(response.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise NotRunning(
                    f"{self.name} at {self.url} does not answer ({error!r}). It may be starting: look at "
                    f"{self.log_path}, and try again when it says that the application has started."
                ) from error


def find_generator(folder: Path, number: int) -> Running:
    """Generator `number` of the run whose logs are in `folder`; raises NotRunning if this user has none there."""
    found = find_generators(folder)
    if number in found:
        return found[number]
    if found:
        raise NotRunning(f"--generator {number}: the generators of {folder} are {sorted(found)}. Give one of these.")
    raise NotRunning(
        f"{folder} has no generator that is running here. Give the folder with the generator-<n>.log of a run that is "
        "going on, as the user who started it, on the machine where it runs. A policy that was exported responses "
        f"without a run: lrl chat {folder}/policy"
    )


def find_generators(folder: Path) -> dict[int, Running]:
    """The running generators of the run whose logs are in `folder`, by number."""
    logs = {_inode(path): path for path in Path(folder).glob("generator-*.log")}
    supervisors = [process for process in psutil.process_iter(["cmdline", "create_time"]) if _is_supervisor(process)]
    found = {}
    for process in sorted(
        supervisors, key=lambda process: process.info["create_time"]
    ):  # of two, the one that replaces
        with contextlib.suppress(OSError, psutil.Error):  # it has ended, or is another user's
            if path := logs.get(_inode(Path(f"/proc/{process.pid}/fd/1"))):
                number = int(re.sub(r"\D", "", path.stem))
                found[number] = _running(number, path, process.info["cmdline"], process.environ())
    return found


def _running(number: int, log_path: Path, words: list[str], environment: dict[str, str]) -> Running:
    flags = dict(zip(words, words[1:], strict=False))
    certificate = flags.get("--ssl-certfile")
    return Running(
        name=f"generator {number}",
        log_path=log_path,
        url=Listening(flags["--host"], tls_cert=certificate).url(int(flags["--port"])),
        token=environment[TOKEN_VARIABLE],
        certificate=certificate,
    )


def _is_supervisor(process: psutil.Process) -> bool:
    """Whether it is the root of a generator's processes, all of which write to the same log."""
    words = process.info["cmdline"] or []
    return any(word.endswith("generators/supervisor.py") for word in words) and "--port" in words


def _inode(path: Path) -> tuple[int, int]:
    """What the file is, by whatever path."""
    status = os.stat(path)
    return status.st_dev, status.st_ino
