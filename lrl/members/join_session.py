"""The member's side of a run, from the start of its server to its end: lease, status, and the request to leave.

The process stays in the foreground as long as its server lives, and the server dies with it, whichever way it ends.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import NamedTuple, Protocol, TypeVar

from lrl.generators.endpoint import Location
from lrl.members.client import RunClient
from lrl.members.discovery import NotRunning
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind, Member, Status

T = TypeVar("T")

POLL_S = 0.5
"""Seconds between two signs of life to the run."""
REFUSED_S, SILENT_S = 5.0, 180.0
"""Seconds after which a run has ended: while its machine says that nobody listens there, and while nothing answers."""

RUN_ENDED = "the run has ended, and so does it"
STATUS_LINES = {
    Status.PENDING: "the run has reached it. It joins at the next sync",
    Status.SERVING: "serves {how}. Ctrl-C has it leave",
    Status.LEFT: "has left; its unfinished responses continue elsewhere",
    Status.LOST: "the run has evicted it: {why}",
    Status.REFUSED: "the run has not admitted it: {why}",
    Status.ENDED: RUN_ENDED,
}
"""The line of output for each status of a member whose server answers."""


class Served(NamedTuple):
    """A server that answers."""

    location: Location
    raise_if_ended: Callable[[], None]


class Joining(Protocol):
    """What a process brings to a run."""

    kind: Kind
    workers: int
    """Processes of a scorer."""

    def served(
        self, number: int, say: Callable[[str], None], waiting: Callable[[], None]
    ) -> AbstractContextManager[Served]:
        """Serves in the context.

        Args:
            number: The member's.
            say: Prints a line.
            waiting: Called at every look of a wait; raises to end it.
        """

    def how(self, member: Member) -> str:
        """Returns how it serves, for the line of output."""


class JoinEnded(Exception):
    """The end of a member; `args` are a message and the exit status of the command."""


def ask(client: RunClient, request: Callable[[], T]) -> T:
    """Returns the answer of a run; raises NotRunning if there is none."""
    try:
        return request()
    except OSError as error:
        raise NotRunning(
            f"The run does not answer at {client.location.url} ({error}). It may have ended, or this machine does not "
            "reach it there: strategy.server.host must be an address that other machines reach."
        ) from error


class JoinSession:
    """A member that joins, from the start of its server to the end.

    Args:
        client: The run.
        spec: Its requirements.
        number: The member's number.
        joining: What it brings.
    """

    def __init__(self, client: RunClient, spec: JoinSpec, number: int, joining: Joining) -> None:
        self.client, self.spec, self.number, self.joining = client, spec, number, joining
        self._location = Location()
        self._heard = time.monotonic()
        self._member = Member(joining.kind, number)
        self._interrupted = self._requested = False  # the request to leave: by a signal here, and sent to the run

    def run(self) -> int:
        """Serves until the member has left or the run has ended.

        Returns:
            Exit status: 1 if the run did not admit the member, or evicted it.

        Raises:
            NotRunning: The run does not answer at its start.
            ValueError: The member cannot serve on this machine.
            RuntimeError: Its server did not start, or has ended.
        """
        before = {signum: signal.signal(signum, self._interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
        failure = ""
        try:
            ask(self.client, self._register)
            with self.joining.served(self.number, self._print, self._waiting) as served:
                self._location = served.location
                while True:
                    self._poll(served)
                    time.sleep(POLL_S)
        except JoinEnded as end:
            line, status = end.args
            self._print(line)
            return int(status)
        except Exception as error:
            failure = str(error)
            raise
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            with contextlib.suppress(OSError, NotRunning):  # the run may have ended
                self.client.withdraw(self.joining.kind, self.number, failure)

    def _poll(self, served: Served) -> None:
        before, member = self._member.status, self._speak()
        if member.status is not before and member.status in STATUS_LINES:
            line = STATUS_LINES[member.status].format(how=self.joining.how(member), why=member.why)
            if member.status.over:
                raise JoinEnded(line, int(member.status not in (Status.LEFT, Status.ENDED)))
            self._print(line)
        served.raise_if_ended()
        if member.status is Status.STARTING:
            self._raise_if_interrupted()
        if self._interrupted and not self._requested:
            self._print("asks the run to let it leave. A second Ctrl-C ends it at once")
            ask(self.client, lambda: self.client.ask_to_leave(self.joining.kind, self.number, by_itself=True))
            self._requested = True
        elif self._requested and not member.leaving and member.leave_refusal:
            self._print(f"stays: {member.leave_refusal}")
            self._requested = self._interrupted = False

    def _speak(self) -> Member:
        """Tells the run that the member lives; returns what the run says, or said last.

        Raises:
            JoinEnded: The run has ended.
        """
        try:
            self._member, self._heard = self._register(), time.monotonic()
        except NotRunning:  # another run has its port
            raise JoinEnded(RUN_ENDED, 0) from None
        except OSError as error:
            limit_s = REFUSED_S if isinstance(error, ConnectionRefusedError) else SILENT_S
            if self.spec.owner.ended or time.monotonic() - self._heard > limit_s:
                raise JoinEnded(RUN_ENDED, 0) from None
        return self._member

    def _register(self) -> Member:
        own = (self.joining.kind, self.number, self.spec.run_id)
        return self.client.register(*own, self._location, self.joining.workers)

    def _waiting(self) -> None:
        self._speak()
        self._raise_if_interrupted()

    def _raise_if_interrupted(self) -> None:
        """Raises JoinEnded after a signal before the run knows the member."""
        if self._interrupted:
            raise JoinEnded("ends before it has joined", 0)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupted = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # the second signal needs no Python to end the process

    def _print(self, line: str) -> None:
        sys.stdout.write(f"{self._member.name}: {line.rstrip('.')}.\n")
        sys.stdout.flush()
