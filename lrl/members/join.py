"""`lrl join` and `lrl leave`: add a member to a live run from another process, or remove one.

`lrl join` stays in the foreground as long as its server lives, and the server dies with it, however
it ends.
"""

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from lrl.errors import NoAnswer, NotRunning
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.members.find_run import find_run
from lrl.members.registry import JoinSpec, Kind, Member, RunClient, Status
from lrl.system.endpoint import Location, own_address_towards, stays_here
from lrl.weights.transport import find_transport
from lrl.workers.remote import WorkersServer

POLL_S = 0.5
"""Seconds between two requests to the run; a member's are its signs of life."""
ANSWER_S = 120.0
"""Seconds that a run may take to answer a request to leave: a sync goes before."""
REFUSED_S, SILENT_S = 5.0, 180.0
"""Seconds after which a run has ended: when nobody listens there, and when nothing answers."""
RUN_ENDED = "the run has ended, and so does it"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def join(
    run: str,
    kind: Kind,
    *,
    number: int | None = None,
    devices: Sequence[int] = (),
    workers: int = 0,
    run_cert: str | None = None,
    **endpoint: Any,
) -> int:
    """Has a member join the run in the folder or at the URL `run`, and serve until its end; returns
    the exit status: 1 if the run did not admit the member, or evicted it.

    `number` is the one that the run has given it already, and `endpoint` has the fields of `Endpoint`
    that are not the run's. Raises NotRunning without a live run or its token, ValueError if a member
    on this machine cannot meet the run's requirements, RuntimeError if the server does not start, or
    has ended.
    """
    client = find_run(run, run_cert)
    spec = client.spec()
    if kind is Kind.GENERATOR:
        check_generator(run, spec, devices)
    settings = settings_here(spec, endpoint, client.location.url)
    if kind is Kind.GENERATOR:
        return JoiningGenerator(run, client, spec, settings=settings, devices=devices).run(number)
    if not spec.terms:
        raise NotRunning(f"{run} takes no workers.")
    return JoiningWorkers(run, client, spec, settings, workers=workers).run(number)


def leave(run: str, kind: Kind, number: int | None, run_cert: str | None = None) -> int:
    """Asks a run to remove a member, by default the last of its kind that joined, and returns exit
    status 0 once it has; raises NotRunning if there is none, or it must stay."""
    client = find_run(run, run_cert)
    if number is None:
        if not (joined := client.joined(kind=kind)):
            raise NotRunning(
                f"{run}: no {kind} has joined. One that the run started leaves by --number N."
            )
        number = max(joined)
    client.ask_to_leave(kind=kind, number=number)
    deadline = time.monotonic() + ANSWER_S
    while (member := client.view(kind=kind, number=number)).leaving:
        if time.monotonic() > deadline:
            raise NotRunning(
                f"{run} has not said within {ANSWER_S:g} s whether {member.name} leaves."
            )
        time.sleep(POLL_S)
    if member.leave_refusal:
        raise NotRunning(f"{run}: {member.leave_refusal}")
    sys.stdout.write(
        f"{member.name} has left {run}; its unfinished responses continue elsewhere.\n"
    )
    return 0


class JoinEnded(Exception):
    """The end of a member; `args` are a message and the exit status of the command."""


@dataclass(eq=False)
class JoinSession(ABC):
    """A joining member, from the start of its server to the end."""

    kind: ClassVar[Kind]
    run_name: str
    """Folder or URL, as the user gave it."""
    client: RunClient
    spec: JoinSpec
    settings: ServerSettings
    """The run's, with this machine's address."""
    workers: int = 0

    def __post_init__(self) -> None:
        self.number = -1
        self._location = Location()
        self._heard = time.monotonic()
        self._member = Member(self.kind, -1)  # the run's last record of it
        self._interrupted = False  # by a signal
        self._requested = False  # to leave, of the run

    @abstractmethod
    def serve(self) -> AbstractContextManager[Location]:
        """Starts the server, which ends with the block; calls `speak` repeatedly meanwhile."""

    def run(self, number: int | None = None) -> int:
        self.number = self.client.claim(kind=self.kind) if number is None else number
        self._register()
        before = {signum: signal.signal(signum, self._interrupt) for signum in SIGNALS}
        failure = ""
        try:
            with self.serve() as self._location:
                self.say(f"answers at {self._location.url}; waits for the run")
                while True:
                    self._poll()
                    time.sleep(POLL_S)
        except JoinEnded as end:
            line, status = end.args
            self.say(line)
            return int(status)
        except Exception as error:
            failure = str(error)
            raise
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            with contextlib.suppress(NotRunning):  # the run may have ended
                self.client.withdraw(kind=self.kind, number=self.number, why=failure)

    def say(self, line: str) -> None:
        sys.stdout.write(f"{self.kind} {self.number}: {line.rstrip('.')}.\n")
        sys.stdout.flush()

    def speak(self) -> None:
        """Renews the lease, and reads the run's record of the member; raises JoinEnded if the run
        has ended, or a signal has come before it has reached the member."""
        try:
            self._member = self._register()
            self._heard = time.monotonic()
        except NoAnswer as error:
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            limit_s = REFUSED_S if refused else SILENT_S
            if self.spec.owner.ended or time.monotonic() - self._heard > limit_s:
                raise JoinEnded(RUN_ENDED, 0) from None
        except NotRunning:  # another run has its port
            raise JoinEnded(RUN_ENDED, 0) from None
        if self._interrupted and self._member.status is Status.STARTING:
            raise JoinEnded("ends before it has joined", 0)

    def _poll(self) -> None:
        before = self._member.status
        self.speak()
        member = self._member
        if member.status is not before and (line := status_line(member)):
            if member.status.over:
                raise JoinEnded(line, int(member.status not in (Status.LEFT, Status.ENDED)))
            self.say(line)
        if self._interrupted and not self._requested:
            self.say("asks the run to let it leave. A second Ctrl-C ends it at once")
            self.client.ask_to_leave(kind=self.kind, number=self.number, by_itself=True)
            self._requested = True
        elif self._requested and not member.leaving and member.leave_refusal:
            self.say(f"stays: {member.leave_refusal}")
            self._requested = self._interrupted = False

    def _register(self) -> Member:
        member: Member = self.client.register(
            kind=self.kind,
            number=self.number,
            run=self.spec.run_id,
            location=self._location,
            node=socket.gethostname(),
            workers=self.workers,
        )
        return member

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        for each in SIGNALS:
            # The second signal needs no Python to end the process.
            signal.signal(each, signal.SIG_DFL)


def status_line(member: Member) -> str:
    how = f"with {member.workers} workers" if member.workers else f"since version {member.version}"
    lines = {
        Status.PENDING: "the run has reached it. It joins at the next sync",
        Status.SERVING: f"serves {how}. Press Ctrl-C to make it leave",
        Status.LEFT: "has left; its unfinished responses continue elsewhere",
        Status.LOST: f"the run has evicted it: {member.why}",
        Status.REFUSED: f"the run has not admitted it: {member.why}",
        Status.ENDED: RUN_ENDED,
    }
    return lines.get(member.status, "")


@dataclass(eq=False)
class JoiningGenerator(JoinSession):
    kind = Kind.GENERATOR
    devices: Sequence[int] = ()
    server: Server | None = None

    @contextmanager
    def serve(self) -> Iterator[Location]:
        # Where its log goes, and its model if the run gives it.
        folder = Path(f"join-{self.spec.run_id}" if "://" in self.run_name else self.run_name)
        folder.mkdir(exist_ok=True)
        model, copy = self.spec.model, folder / f"model-{self.number}"
        try:
            if self.spec.serves_model and not self.spec.owner.here:
                self.say(f"fetches the run's model, {model}, into {copy}")
                model = str(copy)
                self.client.fetch_model(copy, self.speak)
            self.server = self.make_server(model, folder)
            self.say(f"starts, with the model {model}; its log is {self.server.log_path}")
            self.server.start()
            self.server.wait_ready(self.speak)
            yield self.server.location
        finally:
            if self.server is not None:
                self.server.stop()
            if model == str(copy):  # another folder of this name is the user's
                shutil.rmtree(copy, ignore_errors=True)

    def speak(self) -> None:
        super().speak()
        if self.server is not None and not self.server.alive:
            self.server.ready()  # raises, with the end of the log

    def make_server(self, model: str, folder: Path) -> Server:
        spec, number = self.spec, self.number
        transport = find_transport(spec.transport)
        return Server(
            model,
            self.settings,
            backend=spec.transport,
            devices=self.devices,
            folder=folder,
            number=number,
            token=self.client.token,
            transport_environment=transport.server_environment(number) | spec.environment,
            middleware=transport.middleware,
            seed=spec.seed,
        )


@dataclass(eq=False)
class JoiningWorkers(JoinSession):
    kind = Kind.WORKER

    @contextmanager
    def serve(self) -> Iterator[Location]:
        server = WorkersServer(self.spec.terms, self.workers, self.settings, self.client.token)
        try:
            server.start()
            yield server.location()
        finally:
            server.close()


def check_generator(run: str, spec: JoinSpec, devices: Sequence[int]) -> None:
    """Raises ValueError if a generator on this machine cannot join."""
    if why := find_transport(spec.transport).join_refusal(spec.owner.here, spec.settings["host"]):
        raise ValueError(f"{run} {why}")
    if spec.on_cpu == bool(devices):
        needed = (
            "are on the CPU: leave it out"
            if spec.on_cpu
            else "are on GPUs: give the indices of this one's"
        )
        given = ",".join(map(str, devices)) or "(not given)"
        raise ValueError(f"--devices {given}: the run's generators {needed}.")
    # A variable that is not set here is taken from the run.
    for name, here in find_transport(spec.transport).common_environment(os.environ).items():
        there = spec.environment.get(name)
        if here != there:
            of_run = "is not set" if there is None else f"is {there!r}"
            raise ValueError(
                f"{name} is {here!r} here and {of_run} in {run}: a transfer by {spec.transport} "
                f"hangs when its members disagree. Unset {name}; the generator then takes what the "
                "run has."
            )


def settings_here(spec: JoinSpec, endpoint: dict[str, Any], url: str) -> ServerSettings:
    """Returns the run's settings, with this machine's address (by default the one towards the run)
    and TLS; raises ValueError if the run cannot reach that address."""
    if spec.owner.here:
        return ServerSettings(**spec.settings | endpoint)
    host = endpoint.get("host") or own_address_towards(url)
    if stays_here(host):
        raise ValueError(
            f"--host {host}: the run is on another machine. Give the address by which it reaches "
            "this one, with --tls_cert and --tls_key, or --insecure if nobody else is on that "
            "network."
        )
    return ServerSettings(**spec.settings | {"host": host} | endpoint)
