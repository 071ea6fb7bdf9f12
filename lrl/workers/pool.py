"""Gives each job to whichever machine has the fewest for each of its workers."""

from __future__ import annotations

import itertools
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lrl.errors import BadAnswer, WorkerLost, WorkersClosed
from lrl.system.event_loop import LoopThread
from lrl.workers.process import LocalWorkers, WorkerSpec
from lrl.workers.remote import RemoteWorkers

Workers = LocalWorkers | RemoteWorkers
A = TypeVar("A")
Read = Callable[[Any], A]
"""Returns the answer in a worker's JSON; raises BadAnswer for anything else. Whoever has the run's
token may send rank 0 anything, so it unpickles nothing."""
Trial = Callable[[Workers], Coroutine[Any, Any, None]]
"""Tries the code of the workers on a machine; raises ConfigError."""


class WorkerPool:
    """The workers of a run for one kind of job, on all machines; `count` of them on this one."""

    def __init__(self, spec: WorkerSpec, count: int) -> None:
        self.spec = spec
        self.local = LocalWorkers(spec, count)
        self.members = Members()  # the other machines
        self.trial: Trial | None = None  # before a machine gets jobs
        self.started = False
        self._numbers = itertools.count(1)

    @property
    def replaced(self) -> int:
        """Workers that were killed or died, on all machines."""
        return self.local.replaced + self.members.replaced(self.spec.name)

    def job(self, *, here: bool = False) -> WorkerJob | None:
        """Returns a job on the least busy machine, or on this one, for the caller to end; None if
        there is no worker. Raises WorkersClosed before `start` and after `close`."""
        if not self.started:
            raise WorkersClosed(f"the workers of {self.spec.setting} are not running")
        machines: list[Workers] = [] if here else [*self.members.ready]
        if self.local.count:
            machines.append(self.local)
        return self.job_on(least_busy(machines, self.spec.name)) if machines else None

    def job_on(self, machine: Workers) -> WorkerJob:
        machine.jobs[self.spec.name] += 1
        return WorkerJob(self, machine, next(self._numbers))

    def start(self, loop: LoopThread, spec: WorkerSpec | None = None) -> None:
        """Starts the workers of this machine, with another spec if given; see
        `LocalWorkers.start`. Jobs are asked on `loop`."""
        self.spec = self.local.spec = spec or self.spec
        self.local.start(loop)
        self.started = True
        self.trial = None

    def try_out(self, loop: LoopThread, trial: Trial) -> None:
        """Does the trial on this machine; once it has passed, each member does it before it gets
        jobs."""
        if self.local.count:
            limit_s = 2 * self.spec.limit_s(1)
            loop.wait(trial(self.local), limit_s, f"trying {self.spec.setting}")
        self.trial = trial

    def close(self) -> None:
        """Kills the workers of this machine. Idempotent."""
        self.started = False
        self.members.close()
        self.local.close()


@dataclass(eq=False)
class WorkerJob:
    """A group to score, or an episode, on one machine. A call raises CallFailed if the job has
    failed, WorkerLost if its worker has ended through no fault of the job."""

    pool: WorkerPool
    machine: Workers
    number: int
    _ended: bool = False

    @property
    def where(self) -> str:
        """The machine's name in brackets, behind a failure; empty for this machine."""
        return "" if self.machine is self.pool.local else f" ({self.machine.name})"

    async def begin(self, packed: bytes, read: Read[A]) -> A:
        """Scores a group, or begins an episode; only the worker unpickles `packed`, which may hold
        objects of a user's classes."""
        return await self._ask({"begin": b64encode(packed).decode()}, read)

    async def turn(self, turn: dict[str, Any], read: Read[A]) -> A:
        return await self._ask({"turn": turn}, read)

    def end(self) -> None:
        """Ends it. Idempotent."""
        if self._ended:
            return
        self._ended = True
        self.machine.jobs[self.pool.spec.name] -= 1
        self.machine.end(self.pool.spec, self.number)

    async def _ask(self, call: dict[str, Any], read: Read[A]) -> A:
        answer = await self.machine.ask(self.pool.spec, self.number, call)
        try:
            return read(answer)
        except BadAnswer as error:
            if not isinstance(self.machine, RemoteWorkers):
                raise
            self.machine.lose(str(error))
            raise WorkerLost(self.machine.lost) from error


class Members:
    """The members of a run with workers, for these pools. Call each method on any thread."""

    def __init__(self, *pools: WorkerPool) -> None:
        self.pools = {pool.spec.name: pool for pool in pools}
        self.last_loss = ""  # name and reason of the member that was removed last
        self._members: dict[int, RemoteWorkers] = {}
        self._replaced: Counter[str] = Counter()  # workers of members that were removed
        for pool in pools:
            pool.members = self

    def terms(self) -> dict[str, Any]:
        return {name: pool.spec.to_json() for name, pool in self.pools.items()}

    async def check(self, member: RemoteWorkers) -> None:
        """Has a member do each pool's trial before it is added; raises OSError if it does not
        answer or belongs to another run, ConfigError if it cannot work."""
        await member.begin()
        for pool in self.pools.values():
            if pool.trial is not None:
                try:
                    await pool.trial(member)
                except WorkerLost as error:
                    raise OSError(str(error)) from error

    @property
    def all(self) -> list[RemoteWorkers]:
        """The members, lost ones too, that were not removed."""
        return list(self._members.values())

    @property
    def ready(self) -> list[RemoteWorkers]:
        """The members that get work."""
        return [each for each in self.all if not each.lost and each.leaving_since is None]

    def replaced(self, pool: str) -> int:
        """Returns the workers of a pool that were killed or died, also of lost members."""
        return self._replaced[pool] + sum(member.replaced[pool] for member in self.all)

    def leave_refusal(self, member: RemoteWorkers) -> str:
        """Returns why a member must stay; empty if it need not."""
        alone = any(not pool.local.count for pool in self.pools.values())
        if not alone or self.ready != [member]:
            return ""
        return (
            f"{member.name.capitalize()} is the last one that plays episodes. Have another one "
            "join before, or end the run."
        )

    def add(self, member: RemoteWorkers) -> None:
        self._members[member.number] = member

    def remove(self, number: int, why: str) -> bool:
        """Removes a member, whose work goes to others; returns whether it was there."""
        member = self._members.pop(number, None)
        if member is None:
            return False
        self._replaced += member.replaced
        self.last_loss = f"{member.name}: {why}"
        member.lose(why)
        return True

    def close(self) -> None:
        for member in self.all:
            self.remove(member.number, "the run has ended")


def least_busy(machines: Sequence[Workers], pool: str) -> Workers:
    """Returns the first machine with the fewest jobs of a pool a worker, counting one more."""
    return min(machines, key=lambda one: (one.jobs[pool] + 1) / one.count)
