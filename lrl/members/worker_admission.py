"""Admits, loses and releases the members without weights, which have workers.

Such a member gets work as soon as rank 0 reaches it, and one that was only cut off comes again.
"""

import asyncio
import logging
import time
from typing import Any

from lrl.errors import ConfigError
from lrl.members.member import Kind, Member, Status
from lrl.members.registry import Registry
from lrl.system.remote_workers import MemberAddress, RemotePool, RemoteWorkers

log = logging.getLogger(__name__)


class WorkerAdmission:
    """Admits and removes the members of one kind.

    Args:
        kind: Theirs.
        pool: Where they go.
        registry: Where they register.
        token: The run's.
    """

    def __init__(self, kind: Kind, pool: RemotePool[Any], registry: Registry, token: str) -> None:
        self.kind = kind
        self.pool = pool
        self.registry = registry
        self.token = token
        self._admissions: dict[int, asyncio.Task[None]] = {}
        self._served: set[int] = set()

    async def poll(self) -> None:
        """Looks once at the registry."""
        alive = self.registry.alive(self.kind)
        for number, member in alive.items():
            if member.status is Status.STARTING and number not in self._admissions:
                task = asyncio.get_running_loop().create_task(self._admit(member))
                self._admissions[number] = task
                task.add_done_callback(lambda _, number=number: self._admissions.pop(number))  # type: ignore[misc]
        known = {each.number: each for each in self.pool.members}
        for number in self.registry.leaving(self.kind):
            self._release(number, known.get(number))
        for number, workers in known.items():
            why = workers.lost or ("" if number in alive else "its process has ended, or is silent")
            if why and self.pool.remove(number, why):
                log.warning("%s is lost (%s). Others do its work.", workers.title, why)
                self.registry.set_status(self.kind, number, Status.LOST, why=why)

    async def _admit(self, member: Member) -> None:
        try:
            workers: RemoteWorkers = self.pool.reach(
                MemberAddress(
                    member.number,
                    member.node,
                    member.workers,
                    location=member.location,
                    token=self.token,
                )
            )
            await workers.check()
        except ConfigError as error:
            self._refuse(member, Status.REFUSED, str(error))
            return
        except (OSError, ValueError) as error:
            # One that has served may only have lost its network, and is tried again when it speaks.
            self._refuse(
                member,
                Status.LOST if member.number in self._served else Status.REFUSED,
                f"{member.name.capitalize()} on {member.node} cannot be reached at "
                f"{member.location.url}: {error}. It needs an address that this machine reaches: "
                "give it by `lrl join --host`",
            )
            return
        self._served.add(member.number)
        self.pool.add(workers)
        log.info("%s has joined, with %d workers.", workers.title, workers.workers)
        self.registry.set_status(self.kind, member.number, Status.SERVING)

    def _refuse(self, member: Member, status: Status, why: str) -> None:
        log.warning("%s.", why.rstrip("."))
        self.registry.set_status(self.kind, member.number, status, why=why)

    def _release(self, number: int, workers: RemoteWorkers | None) -> None:
        """Has a member leave, when its work is done or has had the time for it."""
        if workers is None:
            refusal = f"The run has no {self.kind} {number} now."
            self.registry.answer_leave(self.kind, number, refusal)
            return
        if workers.leaving_since is None:
            if refusal := self.pool.leave_refusal(workers):
                self.registry.answer_leave(self.kind, number, refusal)
                return
            workers.leaving_since = time.monotonic()
        if workers.idle or time.monotonic() - workers.leaving_since >= workers.leave_s:
            self.pool.remove(number, "it leaves the run")
            self.registry.set_status(self.kind, number, Status.LEFT)
            self.registry.answer_leave(self.kind, number, "")
