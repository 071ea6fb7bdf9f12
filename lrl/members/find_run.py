"""How another process finds a live run and gets its token.

A run writes its address to `fleet/run.json` in its folder, where only the same user can write: an
impostor would be given the run's token. The token itself is never in a file. On the run's machine it
comes from a generator: a log in the run's folder leads to the supervisor that has it open, whose
command line gives the address, and whose environment, which only the same user and root can read,
the token. On another machine the user types it.
"""

import contextlib
import getpass
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lrl.checkpoints.run_folder import OwnerOnlyFolder
from lrl.errors import NotRunning
from lrl.members.registry import FOLDER, RUN, RUN_CERTIFICATE, RUN_TOKEN, RunClient, RunFile
from lrl.system.auth import TOKEN_VARIABLE
from lrl.system.endpoint import Endpoint, Location, first_certificate


def find_run(run: str, certificate: str | None = None) -> RunClient:
    """Returns the live run in the folder `run` or at the URL `run`; raises NotRunning if there is
    none, its file is not trusted, or nobody gave the token.

    `certificate` is the PEM file by which to know a URL's server; without it the text in
    `RUN_CERTIFICATE`, or else the system's CAs.
    """
    if "://" in run:
        text = first_certificate(certificate) if certificate else os.environ.get(RUN_CERTIFICATE)
        return RunClient(Location(run, text or ""), _typed_token(run))
    files = OwnerOnlyFolder(Path(run) / FOLDER)
    try:
        found = files.read(RUN, RunFile)
    except FileNotFoundError as error:
        raise NotRunning(
            f"{run} is not the folder of a live run (there is no {files.path / RUN}). Give one, on "
            "its machine or a shared file system, or the address that the run has printed."
        ) from error
    except OSError as error:  # not trusted, or not readable
        raise NotRunning(str(error)) from error
    if found.owner.ended:
        raise NotRunning(f"{run}: its run has ended, by a signal that left it no time to say so.")
    if found.owner.here:
        return RunClient(found, _token_here(Path(run)))
    return RunClient(Location(found.elsewhere, found.certificate), _typed_token(run))


def _token_here(run: Path) -> str:
    for generator in find_generators(run).values():
        return generator.token
    if token := os.environ.pop(RUN_TOKEN, ""):
        return token
    raise NotRunning(
        f"{run}: none of its generators, which have its token, is running here. They may be "
        f"starting: try again in a minute, as the user who started the run, or set {RUN_TOKEN}."
    )


def _typed_token(run: str) -> str:
    shown = "on its machine, `lrl prompt FOLDER` shows it as OPENAI_API_KEY"
    token = os.environ.pop(RUN_TOKEN, "")
    # A batch job has no keyboard; the error below gives the remedy.
    with contextlib.suppress(EOFError):
        token = token or getpass.getpass(f"The run's token ({shown}): ")
    if not token:
        raise NotRunning(
            f"{run}: no token was typed. Without a keyboard put it in the variable {RUN_TOKEN}; "
            f"{shown}."
        )
    return token


@dataclass(frozen=True)
class Running:
    """A generator of a live run on this machine."""

    location: Location
    token: str = field(repr=False)
    certificate: str | None
    """Path of the PEM file; None without TLS."""


def find_generator(folder: Path, number: int) -> Running:
    """Returns a generator of the run that logs into `folder`; raises NotRunning without it."""
    found = find_generators(folder)
    if number not in found:
        raise NotRunning(
            f"Generator {number} of {folder} is not running here (of {sorted(found)}). Give the "
            "folder of a live run, as its user, on its machine. An exported policy answers without "
            f"a run: lrl chat {shlex.quote(f'{folder}/policy')}"
        )
    return found[number]


def find_generators(folder: Path) -> dict[int, Running]:
    """Returns the live generators of the run that logs into `folder`, by number."""
    logs = list(folder.glob("generator-*.log"))
    processes = filter(_is_supervisor, psutil.process_iter(["cmdline", "create_time"]))
    found = {}
    # In the order of their start: a replacement overwrites the generator before it.
    for process in sorted(processes, key=lambda process: process.info["create_time"]):
        with contextlib.suppress(OSError, psutil.Error):  # it has ended, or is another user's
            output = f"/proc/{process.pid}/fd/1"
            for path in (log for log in logs if log.samefile(output)):
                words = process.info["cmdline"]
                flags = dict(zip(words, words[1:], strict=False))
                endpoint = Endpoint(flags["--host"], tls_cert=flags.get("--ssl-certfile"))
                number = int(re.sub(r"\D", "", path.stem))
                found[number] = Running(
                    endpoint.location(int(flags["--port"])),
                    process.environ()[TOKEN_VARIABLE],
                    endpoint.tls_cert,
                )
    return found


def _is_supervisor(process: psutil.Process) -> bool:
    words = process.info["cmdline"] or []
    return any(word.endswith("generators/supervisor.py") for word in words) and "--port" in words
