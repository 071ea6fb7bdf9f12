"""The member's side of a run, from the start of its server to its end.

The process stays in the foreground as long as its server lives, and the server dies with it,
whichever way it ends.
"""

import contextlib
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar, NamedTuple, TypeVar

from lrl.errors import NotRunning
from lrl.members.client import RunClient
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind, Member, Status
from lrl.system.endpoint import Location

T = TypeVar("T")

POLL_S = 0.5
"""Seconds between two signs of life to the run."""
REFUSED_S, SILENT_S = 5.0, 180.0
"""Seconds after which a run has ended: when nobody listens there, and when nothing answers."""
RUN_ENDED = "the run has ended, and so does it"


@dataclass(frozen=True)
class LocalOverrides:
    """Settings of a member that do not come from the run."""

    devices: list[int] = field(default_factory=list)
    """CUDA indices of a generator; empty on a CPU."""
    workers: int = 0
    """Processes of a member without weights."""
    endpoint: dict[str, Any] = field(default_factory=dict)
    """The fields of `Endpoint` for this machine."""
    run_cert: str | None = None
    """The PEM file of a run that is given by its URL."""
    number: int | None = None
    """The number that the run has given it already; None to take one."""


class Served(NamedTuple):
    """A server that answers."""

    location: Location
    raise_if_ended: Callable[[], None]


class JoinEnded(Exception):
    """The end of a member; `args` are a message and the exit status of the command."""


class JoinSession(ABC):
    """A joining member, from the start of its server to the end.

    Args:
        run: The run, as its user gave it.
        client: The run.
        spec: Its requirements.
        overrides: Settings that do not come from the run.

    Raises:
        ValueError: A member on this machine cannot meet the requirements.
    """

    kind: ClassVar[Kind]

    def __init__(
        self, run: str, client: RunClient, spec: JoinSpec, overrides: LocalOverrides
    ) -> None:
        self.client = client
        self.spec = spec
        self.overrides = overrides
        self.number = -1
        self._location = Location()
        self._heard = time.monotonic()
        self._status = Status.STARTING
        self._interrupted = False  # by a signal
        self._requested = False  # to leave, of the run

    @abstractmethod
    def serve(self) -> AbstractContextManager[Served]:
        """Serves in the context; calls `waiting` at every look of a wait."""

    def run(self) -> int:
        """Serves until the member has left or the run has ended.

        Returns:
            Exit status: 1 if the run did not admit the member, or evicted it.

        Raises:
            NotRunning: The run does not answer at its start.
            RuntimeError: The server did not start, or has ended.
        """
        number = self.overrides.number
        self.number = (
            ask(self.client, lambda: self.client.claim(self.kind)) if number is None else number
        )
        ask(self.client, self._register)
        before = {
            signum: signal.signal(signum, self._interrupt)
            for signum in (signal.SIGINT, signal.SIGTERM)
        }
        failure = ""
        try:
            with self.serve() as served:
                self._location = served.location
                while True:
                    self._poll(served)
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
            with contextlib.suppress(OSError, NotRunning):  # the run may have ended
                self.client.withdraw(self.kind, self.number, failure)

    def say(self, line: str) -> None:
        """Prints a line."""
        sys.stdout.write(f"{self.kind} {self.number}: {line.rstrip('.')}.\n")
        sys.stdout.flush()

    def waiting(self) -> None:
        """Renews the lease; raises JoinEnded if the run has ended, or after a signal."""
        self._speak()
        self._raise_if_interrupted()

    def _poll(self, served: Served) -> None:
        before, member = self._status, self._speak()
        if member.status is not before and (line := status_line(member)):
            if member.status.over:
                raise JoinEnded(line, int(member.status not in (Status.LEFT, Status.ENDED)))
            self.say(line)
        served.raise_if_ended()
        if member.status is Status.STARTING:
            self._raise_if_interrupted()
        if self._interrupted and not self._requested:
            self.say("asks the run to let it leave. A second Ctrl-C ends it at once")
            ask(
                self.client,
                lambda: self.client.ask_to_leave(self.kind, self.number, by_itself=True),
            )
            self._requested = True
        elif self._requested and not member.leaving and member.leave_refusal:
            self.say(f"stays: {member.leave_refusal}")
            self._requested = self._interrupted = False

    def _speak(self) -> Member:
        """Renews the lease; returns the run's record of the member, the last one if the run does
        not respond.

        Raises:
            JoinEnded: The run has ended.
        """
        member = Member(self.kind, self.number, status=self._status)
        try:
            member, self._heard = self._register(), time.monotonic()
        except NotRunning:  # another run has its port
            raise JoinEnded(RUN_ENDED, 0) from None
        except OSError as error:
            limit_s = REFUSED_S if isinstance(error, ConnectionRefusedError) else SILENT_S
            if self.spec.owner.ended or time.monotonic() - self._heard > limit_s:
                raise JoinEnded(RUN_ENDED, 0) from None
        self._status = member.status
        return member

    def _register(self) -> Member:
        return self.client.register(
            self.kind,
            self.number,
            self.spec.run_id,
            location=self._location,
            workers=self.overrides.workers,
        )

    def _raise_if_interrupted(self) -> None:
        """Raises JoinEnded after a signal before the run knows the member."""
        if self._interrupted:
            raise JoinEnded("ends before it has joined", 0)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        for each in (signal.SIGINT, signal.SIGTERM):
            # The second signal needs no Python to end the process.
            signal.signal(each, signal.SIG_DFL)


def status_line(member: Member) -> str:
    """Returns the printed line for a member's status; empty for none."""
    how = f"with {member.workers} workers" if member.workers else f"since version {member.version}"
    lines = {
        Status.PENDING: "the run has reached it. It joins at the next sync",
        Status.SERVING: f"serves {how}. Ctrl-C has it leave",
        Status.LEFT: "has left; its unfinished responses continue elsewhere",
        Status.LOST: f"the run has evicted it: {member.why}",
        Status.REFUSED: f"the run has not admitted it: {member.why}",
        Status.ENDED: RUN_ENDED,
    }
    return lines.get(member.status, "")


def ask(client: RunClient, request: Callable[[], T]) -> T:
    """Returns the answer of a run; raises NotRunning if there is none."""
    try:
        return request()
    except OSError as error:
        raise NotRunning(
            f"The run does not answer at {client.location.url} ({error}). It may have ended, or "
            "this machine does not reach it there: strategy.server.host must be an address that "
            "other machines reach."
        ) from error
