"""The reward hosts of a run, as rank 0 sees them: processes on other machines that score with workers of their own.

A host that is lost takes nothing with it: its jobs fail with `HostLostError`, and the pool gives them to others. A late
answer finds no job. So each job has one list of outcomes, whoever scored it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple, Protocol

from lrl.rewards.job import Job, Scorer, WorkerSpec
from lrl.rewards.job_state import Outcome
from lrl.rewards.messages import BadReportError, Welcome, pack, read_outcomes, welcome

log = logging.getLogger(__name__)

REMEDY = (
    "A host imports the rewards' modules by itself: put them on its machine, installed or in the folder where `lrl "
    "score` starts."
)


class HostLostError(Exception):
    """The host of a job is lost; others can score the job."""


class Link(Protocol):
    """The connection to a host. Its methods return at once, on any thread."""

    def send(self, message: bytes) -> None:
        """Sends a job."""

    def end(self) -> None:
        """Tells the host that the run is over."""

    def cut(self) -> None:
        """Closes the connection."""


class HostStatus(NamedTuple):
    """The status of a host, the last one after its end."""

    state: Literal["serves", "refused", "lost", "ended"]
    why: str = ""


class Host:
    """A reward host. It gets jobs once it is ready.

    Args:
        number: Its number among those of the run.
        node: The name of its machine.
        spec: The limits of its workers.
        link: The connection to it.
    """

    def __init__(self, number: int, node: str, spec: WorkerSpec, link: Link) -> None:
        self.number, self.name = number, f"reward host {number} on {node}"
        self.workers = 0
        """Processes that score on its machine; 0 before it is ready."""
        self.spec, self.link = spec, link
        self._jobs: dict[int, tuple[int, Future[list[Outcome]]]] = {}  # number -> responses, and their outcomes
        self._numbers = itertools.count(1)
        self._lost = ""
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Jobs without outcomes."""
        return len(self._jobs)

    async def outcomes(self, job: Job) -> list[Outcome]:
        """Returns the outcome of each response; see `Processes.outcomes`.

        Raises:
            HostLostError: The host is lost before it has answered.
        """
        future: Future[list[Outcome]] = Future()
        with self._lock:
            if self._lost:
                raise HostLostError(self._lost)
            number = next(self._numbers)
            self._jobs[number] = job.count, future
        try:
            self.link.send(pack(number, job))
            # Its workers have the deadlines of rank 0's. This one is for a host that answers pings and nothing else.
            patience_s = 2 * self.spec.patience_s(self.in_flight)
            return await asyncio.wait_for(asyncio.wrap_future(future), patience_s)
        except TimeoutError:
            self.link.cut()
            raise HostLostError(f"no outcomes from it in {patience_s:.0f} s") from None
        finally:
            with self._lock:
                self._jobs.pop(number, None)

    def answer(self, number: int, values: Any) -> None:
        """Takes the outcomes of a job; without an effect if nobody waits for them any more.

        Raises:
            BadReportError: They are no outcomes.
        """
        with self._lock:
            count, future = self._jobs.get(number, (0, None))
        if future is not None:
            outcomes = read_outcomes(values, count)
            if future.set_running_or_notify_cancel():
                future.set_result([self._named(each) for each in outcomes])

    def lose(self, why: str) -> None:
        """Fails all of its jobs, and every later one."""
        with self._lock:
            self._lost = self._lost or why
            futures = [future for _, future in self._jobs.values()]
            self._jobs.clear()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(HostLostError(why))

    def _named(self, outcome: Outcome) -> Outcome:
        return f"{outcome} ({self.name})" if isinstance(outcome, str) else outcome


class Hosts:
    """The reward hosts of a run. Each method may be called on any thread.

    Args:
        spec: What each host's workers must know.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.trial: Job | None = None
        """A response that a host must score before it gets jobs."""
        self.heartbeat_s = 30.0
        """Seconds between two pings of a host; one without an answer for half as long ends its connection."""
        self._run = secrets.token_hex(8)
        self._members: dict[int, Host] = {}
        self._status: dict[int, HostStatus] = {}
        self._replaced: dict[int, int] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @property
    def ready(self) -> list[Host]:
        """The hosts that get jobs."""
        with self._lock:
            return [host for host in self._members.values() if host.workers]

    @property
    def replaced(self) -> int:
        """Workers of all hosts, also of lost ones, that were killed or died."""
        with self._lock:
            return sum(self._replaced.values())

    def claim(self) -> int:
        """Returns a number that no host of the run has had."""
        with self._lock:
            return next(self._numbers)

    def status(self, number: int) -> HostStatus | None:
        """Returns the status of a host; None before it is ready or refused."""
        with self._lock:
            return self._status.get(number)

    @property
    def refusal(self) -> str:
        """Why the last host that could not score cannot; empty if there is none."""
        with self._lock:
            return next((one.why for one in reversed(self._status.values()) if one.state == "refused"), "")

    def connect(self, number: int | None, run: str, node: str, link: Link) -> tuple[Host, str]:
        """Returns a new host, and the first message to it.

        Args:
            number: The number that it says it has; None for none.
            run: The run that has given it, as a host says that comes again; empty for one that comes first. A host
                that comes again takes the place of its lost connection.
            node: The name of its machine.
            link: The connection to it.
        """
        if number is None or run not in ("", self._run):
            number = self.claim()
        host = Host(number, node, self.spec, link)
        with self._lock:
            before, self._members[number] = self._members.get(number), host
        if before is not None:
            before.link.cut()
            before.lose("it has connected again")
        return host, welcome(Welcome(self._run, self.heartbeat_s, number, self.spec, self.trial))

    def hear(self, host: Host, report: dict[str, Any]) -> None:
        """Takes a message of a host.

        Raises:
            BadReportError: It is none that a host sends.
        """
        match report:
            case {"job": int(number), "outcomes": values, "replaced": int(replaced)}:
                with self._lock:
                    self._replaced[host.number] = replaced
                host.answer(number, values)
            case {"ready": int(workers)} if workers > 0:
                log.info("%s scores with %d workers.", host.name.capitalize(), workers)
                with self._lock:
                    host.workers, self._status[host.number] = workers, HostStatus("serves")
            case {"refused": str(why)}:
                why = f"{host.name.capitalize()} cannot score: {why} {REMEDY}"
                log.warning("%s", why)
                self._leave(host, HostStatus("refused", why))
            case _:
                raise BadReportError(f"{str(report)[:80]!r} is no report of a host")

    def lose(self, host: Host, why: str) -> None:
        """Takes a host out; the pool gives its jobs to others. Without an effect for one that has left."""
        if self._leave(host, HostStatus("lost", why)) and host.workers:
            log.warning("%s is lost (%s); others score its responses.", host.name.capitalize(), why)
        host.lose(why)

    def end(self) -> None:
        """Tells all hosts that the run is over."""
        with self._lock:
            members = list(self._members.values())
        for host in members:
            self._leave(host, HostStatus("ended"))
            host.link.end()
            host.lose("the run has ended")

    def _leave(self, host: Host, status: HostStatus) -> bool:
        with self._lock:
            if self._members.get(host.number) is not host:
                return False
            del self._members[host.number]
            self._status.pop(host.number, None)  # the last one shall stand last
            self._status[host.number] = status
            return True


def least_busy(scorers: Iterable[Scorer]) -> Scorer:
    """Returns the scorer with the fewest jobs for each worker, counting one more; the first of several."""
    return min(scorers, key=lambda one: (one.in_flight + 1) / one.workers)
