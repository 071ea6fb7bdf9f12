"""`lrl serve --join` and `--leave`: adds a generator to a live run or removes one, from outside the run.

A joining generator is a vLLM server under a supervisor, like the run's own, with this process in the trainer's place.
The process stays in the foreground as long as the generator lives, and the generator dies with it, whichever way it
ends.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from lrl.generators.endpoint import Location, is_loopback, own_address_towards
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.membership.client import RunClient
from lrl.membership.discovery import NotRunning
from lrl.membership.registry import JoinSpec, View
from lrl.membership.run_file import find_run
from lrl.weights import find_transport

T = TypeVar("T")

POLL_S = 0.5
"""Seconds between two signs of life to the run."""
REFUSED_S, SILENT_S = 5.0, 180.0
"""Seconds after which a run has ended: while its machine says that nobody listens there, and while nothing answers."""
ANSWER_S = 120.0
"""Seconds that a run may take to answer a request to leave: a sync goes before."""

RUN_ENDED = "the run has ended, and so does it"
STATUS_LINES = {
    "waits": "the run has reached it. It joins at the next sync",
    "serves": "serves since version {version}. Ctrl-C has it leave",
    "left": "has left; its unfinished responses continue elsewhere",
    "lost": "the run has evicted it: {why}",
    "refused": "the run has not admitted it: {why}",
    "ended": RUN_ENDED,
}
"""The line of output for each `MemberStatus`."""


@dataclass(frozen=True)
class LocalOverrides:
    """Settings of a joining generator that do not come from the run."""

    devices: list[int]
    """CUDA indices; empty on a CPU."""
    endpoint: dict[str, Any]
    """The fields of `Endpoint` for this machine."""
    run_cert: str | None = None
    """The PEM file of a run that is given by its URL."""
    number: int | None = None
    """The number that the run has given it already; None to take one."""


class JoinEnded(Exception):
    """The end of a generator that joined; `args` are a message and the exit status of the command."""


def join(run: str, own: LocalOverrides) -> int:
    """Starts a generator, lets it join the run in the folder or at the URL `run`, and waits until it has left or the
    run has ended.

    Returns:
        Exit status: 1 if the run did not admit the generator, or evicted it.

    Raises:
        NotRunning: There is no live run, or its token is not available.
        ValueError: A generator on this machine cannot meet the run's requirements.
        ServerError: The server did not start, or has ended.
    """
    client = find_run(run, own.run_cert)
    spec = ask(client, client.spec)
    settings = settings_here(run, spec, own, client.location.url)
    number = ask(client, client.claim) if own.number is None else own.number
    ask(client, lambda: client.register(number, Location()))
    folder = Path(f"join-{spec.run_id}" if "://" in run else run)
    folder.mkdir(exist_ok=True)

    def make_server(model: str) -> Server:
        # Another run id: this supervisor must not remove the files in /dev/shm that belong to the run itself.
        run_id = f"{spec.run_id}-joined-{number}"
        transport = find_transport(spec.transport)
        environment = transport.server_environment(number, os.environ) | spec.environment
        words = (model, settings, spec.transport, own.devices, folder, number, run_id, client.token, environment)
        return Server(*words, transport.middleware, spec.seed)

    return JoinSession(client, spec, number, folder, make_server).run()


def ask(client: RunClient, request: Callable[[], T]) -> T:
    """Returns the answer of a run; raises NotRunning if there is none."""
    try:
        return request()
    except OSError as error:
        raise NotRunning(
            f"The run does not answer at {client.location.url} ({error}). It may have ended, or this machine does not "
            "reach it there."
        ) from error


def settings_here(run: str, spec: JoinSpec, own: LocalOverrides, url: str) -> ServerSettings:
    """Returns the run's settings with this machine's overrides; raises ValueError if they cannot work here.

    A generator on another machine than the run's listens on the address by which `url`, the run's, is reached, unless
    the overrides say where.
    """
    transport, here = find_transport(spec.transport), spec.owner.here
    if why := transport.join_refusal(here) or ("" if here else transport.address_refusal(spec.settings["host"])):
        raise ValueError(f"{run} {why}")
    check_environment(run, spec, os.environ)
    if spec.on_cpu == bool(own.devices):
        needed = "are on the CPU: leave it out" if spec.on_cpu else "are on GPUs: give the indices of this one's"
        given = ",".join(map(str, own.devices)) or "(not given)"
        raise ValueError(f"--devices {given}: the run's generators {needed}.")
    if here:
        return ServerSettings(**spec.settings | own.endpoint)
    endpoint = {"host": own.endpoint.get("host") or own_address_towards(url)} | own.endpoint
    if is_loopback(host := endpoint["host"]) or host in ("0.0.0.0", "::"):
        raise ValueError(
            f"--host {host}: the run is on another machine. Give the address by which it reaches this one, with "
            "--tls_cert and --tls_key, or --insecure if nobody else is on that network."
        )
    return ServerSettings(**spec.settings | endpoint)


def check_environment(run: str, spec: JoinSpec, own: Mapping[str, str]) -> None:
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
    """A generator that joins, from the start of its server to the end.

    Args:
        client: The run.
        spec: Its requirements.
        number: The generator's number.
        folder: Where its log goes, and its model if the run gives it.
        make_server: Makes the server for a model.
    """

    def __init__(
        self, client: RunClient, spec: JoinSpec, number: int, folder: Path, make_server: Callable[[str], Server]
    ) -> None:
        self.client, self.spec, self.number, self.folder = client, spec, number, folder
        self.make_server = make_server
        self._location = Location()
        self._heard = time.monotonic()
        self._view = View()
        self._interrupted = self._requested = False  # the request to leave: by a signal here, and sent to the run

    def run(self) -> int:
        """Runs the session; see `join`."""
        before = {signum: signal.signal(signum, self._interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self._model() as model, self._served(model) as server:
                while True:
                    self._poll(server)
                    time.sleep(POLL_S)
        except JoinEnded as end:
            line, status = end.args
            self._print(line)
            return int(status)
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            with contextlib.suppress(OSError, NotRunning):  # the run may have ended
                self.client.withdraw(self.number)

    @contextlib.contextmanager
    def _model(self) -> Iterator[str]:
        """The model: a name, a folder of this machine, or one that is fetched from the run and removed at the end."""
        if self.spec.owner.here or not self.spec.serves_model:
            yield self.spec.model
            return
        folder = self.folder / f"model-{self.number}"
        self._print(f"fetches the run's model, {self.spec.model}, into {folder}")
        try:
            ask(self.client, lambda: self.client.fetch_model(folder, self._raise_if_interrupted))
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _served(self, model: str) -> Iterator[Server]:
        server = self.make_server(model)
        try:
            self._print(f"starts, with the model {model}; its log is {server.log_path}")
            server.start()
            server.wait_ready(self._starting)
            self._location = Location(**vars(server.location))
            self._print(f"answers at {server.url}; waits for the run")
            yield server
        finally:
            server.stop()

    def _poll(self, server: Server) -> None:
        before, view = self._view, self._speak()
        if view.status is not None and (before.status is None or view.status.state != before.status.state):
            status = view.status
            line = STATUS_LINES[status.state].format(version=status.version, why=status.why)
            if status.over:
                raise JoinEnded(line, int(status.state not in ("left", "ended")))
            self._print(line)
        if not server.alive:
            server.ready()  # raises, with the end of the log
        if view.status is None:
            self._raise_if_interrupted()
        if self._interrupted and not self._requested:
            self._print("asks the run to let it leave. A second Ctrl-C ends it at once")
            ask(self.client, lambda: self.client.ask_to_leave(self.number))
            self._requested = True
        elif self._requested and not view.leaving and view.why_it_stays:
            self._print(f"stays: {view.why_it_stays}")
            self._requested = self._interrupted = False

    def _speak(self) -> View:
        """Tells the run that the generator lives; returns what the run says, or said last.

        Raises:
            JoinEnded: The run has ended.
        """
        try:
            self._view, self._heard = self.client.register(self.number, self._location), time.monotonic()
        except NotRunning:  # another run has its port
            raise JoinEnded(RUN_ENDED, 0) from None
        except OSError as error:
            patience = REFUSED_S if isinstance(error, ConnectionRefusedError) else SILENT_S
            if self.spec.owner.ended or time.monotonic() - self._heard > patience:
                raise JoinEnded(RUN_ENDED, 0) from None
        return self._view

    def _starting(self) -> None:
        self._speak()
        self._raise_if_interrupted()

    def _raise_if_interrupted(self) -> None:
        """Raises JoinEnded after a signal before the run knows the generator."""
        if self._interrupted:
            raise JoinEnded("ends before it has joined", 0)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # the second signal needs no Python to end the process

    def _print(self, line: str) -> None:
        sys.stdout.write(f"generator {self.number}: {line.rstrip('.')}.\n")
        sys.stdout.flush()


def leave(run: str, number: int | None) -> int:
    """Asks a run to remove generator `number`, by default the last that joined; returns exit status 0 when it has.

    Raises:
        NotRunning: There is no live run, it has no such generator, or the generator must stay.
    """
    client = find_run(run)
    if number is None:
        if not (joined := ask(client, client.joined)):
            raise NotRunning(f"{run}: no generator has joined. One that the run started leaves by --generator N.")
        number = max(joined)
    asked = number
    ask(client, lambda: client.ask_to_leave(asked))
    deadline = time.monotonic() + ANSWER_S
    while (view := ask(client, lambda: client.view(asked))).leaving:
        if time.monotonic() > deadline:
            raise NotRunning(f"{run} has not said within {ANSWER_S:g} s whether generator {number} leaves.")
        time.sleep(POLL_S)
    if view.why_it_stays:
        raise NotRunning(f"--leave {run}: {view.why_it_stays}")
    sys.stdout.write(f"generator {number} has left {run}; its unfinished responses continue elsewhere.\n")
    return 0
