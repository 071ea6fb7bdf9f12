"""`lrl serve --join` and `--leave`: adds a generator to a live run or removes one, from outside the run.

A joining generator is a vLLM server under a supervisor, like the run's own, with this process in the trainer's place.
The process stays in the foreground as long as the generator lives, and the generator dies with it, whichever way it
ends.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lrl.generators.endpoint import is_loopback
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.membership.discovery import NotRunning
from lrl.membership.registry import Address, JoinSpec, MemberStatus, Registry
from lrl.weights import find_transport

POLL_S = 0.5
"""Seconds between two polls of the registry."""
ANSWER_S = 120.0
"""Seconds that a run may take to answer a request to leave; a shared file system alone may take a minute."""

STATUS_LINES = {
    "waits": "the run has reached it. It joins at the next sync",
    "serves": "serves since version {version}. Ctrl-C has it leave",
    "left": "has left; its unfinished responses continue elsewhere",
    "lost": "the run has evicted it: {why}",
    "refused": "the run has not admitted it: {why}",
}
"""The line of output for each `MemberStatus`."""


@dataclass(frozen=True)
class LocalOverrides:
    """Settings of a joining generator that do not come from the run."""

    devices: list[int]
    """CUDA indices; empty on a CPU."""
    endpoint: dict[str, Any]
    """The fields of `Endpoint` for this machine."""


class JoinEnded(Exception):
    """The end of a generator that joined; `args` are a message and the exit status of the command."""


def join(run: Path, own: LocalOverrides) -> int:
    """Starts a generator, lets it join the run in the folder `run`, and waits until it has left or the run has ended.

    Returns:
        Exit status: 1 if the run did not admit the generator, or evicted it.

    Raises:
        NotRunning: The folder has no live run, or its token is not available.
        ValueError: A generator on this machine cannot meet the run's requirements.
        ServerError: The server did not start, or has ended.
    """
    registry = Registry(run)
    spec = registry.spec()
    settings = settings_here(run, spec, own)
    token = registry.token(spec)
    number = registry.claim(spec.generators)
    try:
        # Another run id: this supervisor must not remove the files in /dev/shm that belong to the run itself.
        run_id = f"{spec.run_id}-joined-{number}"
        transport = find_transport(spec.transport)
        environment = transport.server_environment(number, os.environ) | spec.environment
        server = Server(
            *(spec.model, settings, spec.transport, own.devices, run, number, run_id, token),
            *(environment, transport.middleware),
        )
        return JoinSession(registry, spec, server).run()
    finally:
        registry.withdraw(number)


def settings_here(run: Path, spec: JoinSpec, own: LocalOverrides) -> ServerSettings:
    """Returns the run's settings with this machine's overrides; raises ValueError if they cannot work here."""
    transport, here = find_transport(spec.transport), spec.owner.here
    if why := transport.join_refusal(here) or ("" if here else transport.address_refusal(spec.settings["host"])):
        raise ValueError(f"{run} {why}")
    check_environment(run, spec, os.environ)
    if spec.on_cpu == bool(own.devices):
        needed = "are on the CPU: leave it out" if spec.on_cpu else "are on GPUs: give the indices of this one's"
        given = ",".join(map(str, own.devices)) or "(not given)"
        raise ValueError(f"--devices {given}: the run's generators {needed}.")
    host = own.endpoint.get("host", "")
    if not spec.owner.here and (not host or is_loopback(host) or host in ("0.0.0.0", "::")):
        raise ValueError(
            f"--host {host or '(not given)'}: the run is on another machine. Give the address by which it reaches this "
            "one, with --tls_cert and --tls_key, or --insecure if nobody else is on that network."
        )
    return ServerSettings(**spec.settings | own.endpoint)


def check_environment(run: Path, spec: JoinSpec, own: Mapping[str, str]) -> None:
    """Raises ValueError if a variable here contradicts the run's; what is only missing here is set for the server."""
    for name, here in find_transport(spec.transport).common_environment(own).items():
        there = spec.environment.get(name)
        if here != there:
            of_run = "is not set" if there is None else f"is {there!r}"
            raise ValueError(
                f"{name} is {here!r} here and {of_run} in {run}: a transfer by {spec.transport} hangs when its members "
                f"disagree. Unset {name}; the generator then takes what the run has."
            )


class JoinSession:
    """A generator that joins, from the start of its server to the end."""

    def __init__(self, registry: Registry, spec: JoinSpec, server: Server) -> None:
        self.registry, self.spec, self.server = registry, spec, server
        self._interrupted = self._requested = False  # the request to leave: by a signal here, and sent to the run
        self._status: MemberStatus | None = None

    def run(self) -> int:
        """Runs the session; see `join`."""
        before = {signum: signal.signal(signum, self._interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._print(f"starts, with the model {self.spec.model}; its log is {self.server.log_path}")
            self.server.start()
            self.server.wait_ready(self._check_run)
            self.registry.announce(self.server.number, address_of(self.server))
            self._print(f"answers at {self.server.url}; waits for the run")
            while True:
                self._poll()
                time.sleep(POLL_S)
        except JoinEnded as end:
            line, status = end.args
            self._print(line)
            return int(status)
        finally:
            self.server.stop()
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _poll(self) -> None:
        number = self.server.number
        status = self.registry.status(number)
        if status is not None and (self._status is None or status.state != self._status.state):
            self._status = status
            line = STATUS_LINES[status.state].format(version=status.version, why=status.why)
            if status.over:
                raise JoinEnded(line, int(status.state != "left"))
            self._print(line)
        self._check_run()
        if not self.server.alive:
            self.server.ready()  # raises, with the end of the log
        if self._interrupted and not self._requested:
            self._print("asks the run to let it leave. A second Ctrl-C ends it at once")
            self.registry.ask_to_leave(number)
            self._requested = True
        elif self._requested and (why := self.registry.leave_answer(number)):
            self._print(f"stays: {why}")
            self._requested = self._interrupted = False

    def _check_run(self) -> None:
        """Raises JoinEnded if the run has ended, or after a signal before the run knows the generator."""
        if not self.registry.is_live(self.spec):
            raise JoinEnded("the run has ended, and so does it", 0)
        if self._interrupted and self._status is None:
            raise JoinEnded("ends before it has joined", 0)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # the second signal needs no Python to end the process

    def _print(self, line: str) -> None:
        sys.stdout.write(f"{self.server.name}: {line.rstrip('.')}.\n")
        sys.stdout.flush()


def address_of(server: Server) -> Address:
    """Returns the address and certificate by which the run reaches a server of this machine."""
    return Address(**vars(server.location))


def leave(run: Path, number: int | None) -> int:
    """Asks a run to remove generator `number`, by default the last that joined; returns exit status 0 when it has.

    Raises:
        NotRunning: The folder has no live run, it has no such generator, or the generator must stay.
    """
    registry = Registry(run)
    spec = registry.spec()
    if number is None:
        if not (joined := registry.joined()):
            raise NotRunning(f"{run}: no generator has joined. One that the run started leaves by --generator N.")
        number = max(joined)
    registry.ask_to_leave(number)
    deadline = time.monotonic() + ANSWER_S
    while (why := registry.leave_answer(number)) is None:
        if not registry.is_live(spec) or time.monotonic() > deadline:
            raise NotRunning(
                f"{run} has not said within {ANSWER_S:g} s whether generator {number} leaves, or has ended."
            )
        time.sleep(POLL_S)
    if why:
        raise NotRunning(f"--leave {run}: {why}")
    sys.stdout.write(f"generator {number} has left {run}; its unfinished responses continue elsewhere.\n")
    return 0
