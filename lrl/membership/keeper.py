"""Keeps alive what a launcher starts: each is a job that joins the run, and is replaced when it ends.

The jobs are generators or reward hosts; a `Roll` says what the run has made of each.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lrl.generators.launchers import Job, Launcher
from lrl.generators.server import ServerError
from lrl.membership.registry import MemberStatus
from lrl.membership.run_file import CERTIFICATE_VARIABLE, TOKEN_VARIABLE, url_elsewhere
from lrl.membership.service import RegistryServer

log = logging.getLogger(__name__)

POLL_S = 0.5
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 300.0
OWN_END_S = 20.0
"""Seconds that a job has to end by itself when the run has told it. A scheduler's way is a SIGKILL to all
processes at once: of a generator also to its supervisor, which would have removed what lies in shared memory."""
ATTEMPTS = 3
"""Jobs of each place that may fail before a run gives up at its start."""


class Roll(Protocol):
    """The members of one kind, by number, as rank 0 knows them; `lrl.membership.registry.Registry` is the generators'.

    Its methods may be called on any thread.
    """

    def claim(self) -> int:
        """Returns a number that no member has had."""

    def status(self, number: int) -> MemberStatus | None:
        """Returns what has become of a member; None before the run has reached it."""

    @property
    def refusal(self) -> str:
        """Why the last member that was refused may not join; empty if there is none."""


@dataclass(frozen=True)
class Kind:
    """The kind of a launcher's jobs."""

    name: str
    job: str
    """The name of a job, before its number."""
    option: str
    """The option by which a job gets its number."""


GENERATORS = Kind("generator", "generator", "--generator")
REWARD_HOSTS = Kind("reward host", "rewards", "--number")


@dataclass
class _Place:
    """One of the jobs that are asked for; -1 is no number."""

    number: int = -1
    job: Job | None = None
    failures: int = 0
    next_start: float = 0.0
    left: bool = False


class Keeper:
    """Starts, watches, replaces and ends the jobs of a launcher.

    Args:
        launcher: What starts them.
        roll: Where they join.
        words: The words of a job after `lrl`, without its number.
        environment: Its variables.
        folder: The run's folder.
        kind: What they are.
    """

    def __init__(
        self,
        launcher: Launcher,
        roll: Roll,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        kind: Kind = GENERATORS,
    ) -> None:
        self.launcher, self.roll, self.folder, self.kind = launcher, roll, folder, kind
        self.words, self.environment = words, environment
        self.said = ""
        """The end of what the last job that failed has printed."""
        self._places = [_Place() for _ in range(launcher.jobs)]

    @classmethod
    def of_run(cls, launcher: Launcher, server: RegistryServer, devices: Sequence[int], folder: Path) -> "Keeper":
        """Returns one whose jobs join at `server`, each with these CUDA indices among those that it sees."""
        words = ["serve", "--join", url_elsewhere(server)]
        words += ["--devices", ",".join(map(str, devices))] if devices else []
        return cls(launcher, server.registry, words, environment_of(server), folder)

    def wait_joined(self, count: Callable[[], int], deadline_s: float, interrupted: Callable[[], None]) -> None:
        """Waits until all have joined, or some of them at the deadline.

        Args:
            count: Returns how many have joined.
            deadline_s: Seconds to wait.
            interrupted: Called at every look; raises to end the wait.

        Raises:
            ServerError: None has joined by then, or each job has failed several times.
        """
        end = time.monotonic() + deadline_s
        while (joined := count()) < len(self._places):
            interrupted()
            if not joined:
                self.raise_if_in_vain()
            if time.monotonic() > end:
                if not joined:
                    raise self._nobody(f"within server.start_timeout_s={deadline_s:g}")
                text = "Only %d of %d %ss have joined so far; the run begins."
                log.warning(text, joined, len(self._places), self.kind.name)
                return
            time.sleep(0.1)

    async def keep_forever(self) -> None:
        """Has every place filled, except those whose member was asked to leave."""
        while True:
            for place in self._places:
                await self._look_after(place)
            await asyncio.sleep(POLL_S)

    def raise_if_in_vain(self) -> None:
        """Raises ServerError if each job has failed several times."""
        if all(place.failures >= ATTEMPTS for place in self._places):
            raise self._nobody(f"in {ATTEMPTS} attempts")

    def _nobody(self, when: str) -> ServerError:
        tails = (each.job.tail() for each in self._places if each.job is not None)
        words = self.said or self.roll.refusal or next(tails, "")
        said = f" The last one said:\n{words}" if words else ""
        launcher = f"{self.launcher.setting} {type(self.launcher).__name__}"
        return ServerError(f"No {self.kind.name} of {launcher} has joined {when}.{said}")

    def stop(self) -> None:
        """Ends all jobs; the run has told its members that it is over."""
        self._end([place.job for place in self._places if place.job is not None])

    def _end(self, jobs: Sequence[Job]) -> None:
        deadline = time.monotonic() + (OWN_END_S if self.launcher.starts else 0.0)
        while any(job.alive for job in jobs) and time.monotonic() < deadline:
            time.sleep(0.1)
        for job in jobs:
            job.stop()

    async def _look_after(self, place: _Place) -> None:
        if place.job is None:
            if not place.left and time.monotonic() >= place.next_start:
                await self._start(place)
            return
        status = self.roll.status(place.number)
        serves = status is not None and status.state == "serves"
        if serves:
            place.failures = 0
        # What serves is kept, also when its scheduler has lost sight of it: the run notices when it is silent.
        if serves or (place.job.alive and not (status is not None and status.over)):
            return
        await asyncio.to_thread(self._end, [place.job])
        place.left = status is not None and status.state == "left"
        if not place.left:
            why = status.why if status is not None else "its process has ended"
            self._failed(place, f"{why}\n{place.job.tail()}")
        place.job = None

    async def _start(self, place: _Place) -> None:
        place.number = self.roll.claim()
        words, name = [*self.words, self.kind.option, str(place.number)], f"{self.kind.job}-{place.number}"
        try:
            place.job = await asyncio.to_thread(self.launcher.start, name, words, self.environment, self.folder)
        except OSError as error:
            self._failed(place, f"it cannot be started: {error}")

    def _failed(self, place: _Place, why: str) -> None:
        """Notes when the next attempt is due."""
        pause_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**place.failures)
        name = self.kind.name.capitalize()
        log.warning("%s %d is replaced in %g s: %s", name, place.number, pause_s, why)
        place.next_start, self.said = time.monotonic() + pause_s, why
        place.failures += 1


def environment_of(server: RegistryServer) -> dict[str, str]:
    """Returns the variables of a job that joins at `server`."""
    return os.environ | {TOKEN_VARIABLE: server.token, CERTIFICATE_VARIABLE: server.location().certificate}
