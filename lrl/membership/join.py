"""`lrl serve --join` and `--leave`: one more generator for a run that goes on, or one less; both from outside the run.

A newcomer is a vLLM server under a supervisor, like the run's own; its trainer's place is this process's. It stays in
the foreground for as long as the generator lives, and the generator dies with it, whichever way it ends.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lrl.generators.endpoint import first_certificate, is_loopback
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.membership.discovery import NotRunning
from lrl.membership.registry import Address, JoinSpec, MemberStatus, Registry

LOOK_S = 0.5
"""How often the register is looked into."""
ANSWER_S = 120.0
"""Within so many seconds a run says whether a generator leaves; a shared file system alone may take a minute."""

WORDS = {
    "waits": "the run has reached it. It joins at the next sync",
    "serves": "serves since version {version}. Ctrl-C has it leave",
    "left": "has left; what it was writing goes on elsewhere",
    "lost": "the run has taken it out: {why}",
    "refused": "the run has not taken it in: {why}",
}
"""What is said of each `MemberStatus`."""


@dataclass(frozen=True)
class LocalOverrides:
    """What a newcomer does not have from the run.

    Args:
        devices: CUDA indices; none on a CPU.
        endpoint: Those of the fields of `Endpoint` that are this machine's own.
    """

    devices: list[int]
    endpoint: dict[str, Any]


class JoinEnded(Exception):
    """The generator is to end; the message says why.

    Args:
        why: Words for the user.
        status: Exit status of the command.
    """

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


def join(run: Path, own: LocalOverrides) -> int:
    """Start a generator, have it join, and stay until it has left or the run has ended.

    Args:
        run: The run's folder.
        own: What the run does not decide.

    Returns:
        Exit status: 1 if the run did not take it in, or took it out.

    Raises:
        NotRunning: No run goes on there, or its token is not to be had.
        ValueError: A generator here cannot be what the run asks for.
        ServerError: It did not start, or has ended.
    """
    registry = Registry(run)
    spec = registry.spec()
    settings = settings_here(run, spec, own)
    token = registry.token(spec)
    number = registry.claim(spec.generators)
    try:
        # A run id of its own: what stands in /dev/shm under the run's is not this supervisor's to remove.
        run_id = f"{spec.run_id}-joined-{number}"
        server = Server(spec.model, settings, spec.transport, own.devices, run, number, run_id, token)
        return JoinSession(registry, spec, server).stay()
    finally:
        registry.withdraw(number)


def settings_here(run: Path, spec: JoinSpec, own: LocalOverrides) -> ServerSettings:
    """The run's settings with what is this machine's own; raises ValueError if they cannot be met here."""
    if spec.transport == "ipc":
        raise ValueError(
            f"{run} moves its weights within one GPU (ipc), which its one generator shares with the trainer. For a "
            "fleet that grows, start it with strategy.generator_devices above 0."
        )
    if spec.on_cpu == bool(own.devices):
        needed = "are on the CPU: leave it out" if spec.on_cpu else "are on GPUs: give the indices of this one's"
        raise ValueError(
            f"--devices {','.join(map(str, own.devices)) or '(not given)'}: the run's generators {needed}."
        )
    if not spec.owner.here:
        _check_other_machine(run, spec, own.endpoint.get("host", ""))
    return ServerSettings(**spec.settings | own.endpoint)


def _check_other_machine(run: Path, spec: JoinSpec, host: str) -> None:
    if spec.transport == "shared_memory":
        raise ValueError(
            f"{run} moves its weights through shared memory, which only its own machine has, and this is another one. "
            "Join there, or start the run on GPUs with strategy.weight_transfer: nccl."
        )
    if not host or is_loopback(host) or host in ("0.0.0.0", "::"):
        raise ValueError(
            f"--host {host or '(not given)'}: the run is on another machine. Give the address by which it reaches this "
            "one, with --tls_cert and --tls_key, or --insecure if nobody else is on that network."
        )


class JoinSession:
    """A generator that joins, from its start to its end.

    Args:
        register: The run's.
        terms: The run's.
        server: Not started yet.
    """

    def __init__(self, registry: Registry, spec: JoinSpec, server: Server) -> None:
        self.registry, self.spec, self.server = registry, spec, server
        self._told = self._asked = False
        self._status: MemberStatus | None = None

    def stay(self) -> int:
        """See `join`."""
        before = {signum: signal.signal(signum, self._take) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._say(f"starts, with the model {self.spec.model}; its log is {self.server.log_path}")
            self.server.start()
            self.server.wait_ready(self._go_on)
            self.registry.announce(self.server.number, address_of(self.server))
            self._say(f"responses at {self.server.url}; waits for the run")
            self._follow()
        except JoinEnded as over:
            self._say(str(over))
            return over.status
        finally:
            self.server.stop()
            for signum, handler in before.items():
                signal.signal(signum, handler)
        return 0

    def _follow(self) -> None:
        """Say what becomes of it until it is over."""
        number = self.server.number
        while True:
            self._note_standing()
            self._go_on()
            if not self.server.alive:
                self.server.ready()  # raises, with the end of the log
            if self._told and not self._asked:
                self._say("asks the run to let it go. A second Ctrl-C ends it at once")
                self.registry.ask_to_leave(number)
                self._asked = True
            elif self._asked and (why := self.registry.refusal(number)):
                self._say(f"stays: {why}")
                self._asked = self._told = False
            time.sleep(LOOK_S)

    def _note_standing(self) -> None:
        status = self.registry.status(self.server.number)
        if status is None or (self._status is not None and status.state == self._status.state):
            return
        self._status = status
        words = WORDS[status.state].format(version=status.version, why=status.why)
        if status.over:
            raise JoinEnded(words, status=int(status.state != "left"))
        self._say(words)

    def _go_on(self) -> None:
        """Raise Over if the run has ended, or the generator is to leave and has nothing to leave."""
        if not self.registry.goes_on(self.spec):
            raise JoinEnded("the run has ended, and so does it", status=0)
        if self._told and self._status is None:
            raise JoinEnded("ends before it has joined", status=0)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        """The first signal has it leave; the second one needs no Python to end the process."""
        self._told = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    def _say(self, what: str) -> None:
        sys.stdout.write(f"{self.server.name}: {what.rstrip('.')}.\n")
        sys.stdout.flush()


def address_of(server: Server) -> Address:
    """Where and how the run reaches a server of this machine."""
    settings = server.settings
    if not settings.tls_cert:
        return Address(server.url)
    certificate = first_certificate(settings.tls_cert) if settings.tls_trust == "certificate" else ""
    return Address(server.url, settings.tls_trust, certificate)


def leave(run: Path, number: int | None) -> int:
    """Have a generator leave a run, and wait until it has.

    Args:
        run: The run's folder.
        number: Of the generator; by default the last that joined.

    Returns:
        Exit status 0.

    Raises:
        NotRunning: No run goes on there, there is no such generator, or the run does not let it go.
    """
    registry = Registry(run)
    spec = registry.spec()
    if number is None:
        if not (joined := registry.joined()):
            raise NotRunning(f"{run}: no generator has joined. One that the run started leaves by --generator N.")
        number = max(joined)
    registry.ask_to_leave(number)
    deadline = time.monotonic() + ANSWER_S
    while (why := registry.refusal(number)) is None:
        if not registry.goes_on(spec) or time.monotonic() > deadline:
            raise NotRunning(
                f"{run} has not said within {ANSWER_S:g} s whether generator {number} leaves, or has ended."
            )
        time.sleep(LOOK_S)
    if why:
        raise NotRunning(f"--leave {run}: {why}")
    sys.stdout.write(f"generator {number} has left {run}; what it was writing goes on elsewhere.\n")
    return 0
