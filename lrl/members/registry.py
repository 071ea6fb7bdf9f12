"""The registry of a run, on rank 0: its members, of all kinds.

A process that joins takes a number, says again and again where its server is, and reads what the
run has made of it (`lrl.members.client`, over `lrl.members.service`). The run admits, loses and
releases members on its side (`lrl.members.admission`). Each method may be called on any thread.
"""

import logging
import threading
import time
from dataclasses import replace
from typing import Any

from lrl.members.join_spec import JoinSpec
from lrl.members.member import LEASE_S, Kind, Member, Status
from lrl.system.endpoint import Location

log = logging.getLogger(__name__)

END_S = 2.0
"""Seconds that a run waits at its end until its members have heard of it."""


class Registry:
    """The registry; `spec` has the requirements of a member."""

    def __init__(self, spec: JoinSpec) -> None:
        self.spec = spec
        self._members: dict[tuple[Kind, int], Member] = {}
        self._numbers = {kind: self._first(kind) for kind in Kind}
        self._lock = threading.Lock()

    # ---- for processes that join or ask

    def claim(self, kind: Kind) -> int:
        """Returns a number that no member of this kind has had."""
        with self._lock:
            number = self._numbers[kind]
            self._numbers[kind] += 1
            self._members[kind, number] = Member(kind, number, heard=time.monotonic())
            return number

    def register(
        self, kind: Kind, number: int, location: Location, node: str = "", workers: int = 0
    ) -> Member:
        """Renews the lease of a member; returns the run's record of it.

        Args:
            kind: The member's.
            number: The member's.
            location: Where its server is; an empty URL says that it starts.
            node: The name of its machine.
            workers: Processes of a member without weights.

        Raises:
            LookupError: Nobody has claimed that number.
        """

        with self._lock:
            if not self._first(kind) <= number < self._numbers[kind]:
                raise LookupError(f"nobody has taken the number {number} for a {kind} that joins")
            status = self._record(kind, number).status
            # One without weights that was cut off holds nothing that could be old.
            if status is Status.LOST and not kind.has_weights:
                status = Status.STARTING
            return self._change(
                kind,
                number,
                location=location,
                node=node,
                workers=workers,
                heard=time.monotonic(),
                status=status,
            )

    def withdraw(self, kind: Kind, number: int, why: str = "") -> None:
        """Notes the end of a member's process; a member that has not served and gives a reason is
        refused."""
        with self._lock:
            member = self._change(kind, number, heard=0.0)
            if why and member.status in (Status.STARTING, Status.PENDING):
                refusal = f"{member.name.capitalize()} on {member.node} cannot serve: {why}"
                log.warning("%s", refusal)
                self._change(kind, number, status=Status.REFUSED, why=refusal)

    def ask_to_leave(self, kind: Kind, number: int, by_itself: bool = False) -> None:
        """Notes a request that a member leaves; the run's own generators have entries from then on.

        Args:
            kind: The member's.
            number: The member's.
            by_itself: Whether its own process asks, at a signal.
        """
        with self._lock:
            self._change(kind, number, leaving=True, leave_refusal="", by_itself=by_itself)

    def view(self, kind: Kind, number: int) -> Member:
        """Returns the run's record of a member."""
        with self._lock:
            return self._record(kind, number)

    def joined(self, kind: Kind) -> list[int]:
        """Returns the numbers of the members of this kind that the run has admitted."""
        return [
            member.number
            for member in self.members(kind)
            if member.status in (Status.PENDING, Status.SERVING)
        ]

    # ---- for the run

    def members(self, kind: Kind) -> list[Member]:
        """Returns all members that have ever joined, in the order of their numbers."""
        first = self._first(kind)
        with self._lock:
            found = [
                each
                for each in self._members.values()
                if each.kind is kind and each.number >= first
            ]
        return sorted(found, key=lambda member: member.number)

    def alive(self, kind: Kind) -> dict[int, Member]:
        """Returns the members with a lease and an address, by number."""
        now = time.monotonic()
        return {
            each.number: each
            for each in self.members(kind)
            if now - each.heard < LEASE_S and each.location.url
        }

    def leaving(self, kind: Kind) -> list[int]:
        """Returns the numbers of the members that must leave."""
        with self._lock:
            return [
                each.number for each in self._members.values() if each.kind is kind and each.leaving
            ]

    def refusal(self, kind: Kind) -> str:
        """Returns the reason of the last refusal; empty without one."""
        found = [member.why for member in self.members(kind) if member.status is Status.REFUSED]
        return found[-1] if found else ""

    def set_status(
        self, kind: Kind, number: int, status: Status, version: int = -1, why: str = ""
    ) -> None:
        """Notes the status of a member; one that has ended with the run stays so."""
        with self._lock:
            if self._record(kind, number).status is not Status.ENDED:
                self._change(kind, number, status=status, version=version, why=why)

    def answer_leave(self, kind: Kind, number: int, refusal: str) -> None:
        """Answers a member's request to leave: the reason to reject it, or empty if it has left."""
        with self._lock:
            self._change(kind, number, leaving=False, leave_refusal=refusal)

    def end(self) -> None:
        """Tells all members that the run ends, and waits a moment until they know."""
        with self._lock:
            announced_s = time.monotonic()
            for member in list(self._members.values()):
                if not member.status.over:
                    self._change(member.kind, member.number, status=Status.ENDED)
        while time.monotonic() - announced_s < END_S:
            with self._lock:
                silent = [
                    each
                    for each in self._members.values()
                    if announced_s - LEASE_S < each.heard <= announced_s
                ]
            if not silent:
                return
            time.sleep(0.05)

    def _first(self, kind: Kind) -> int:
        """The first number of those that join; the run's own generators have the ones before."""
        return self.spec.generators if kind is Kind.GENERATOR else 0

    def _record(self, kind: Kind, number: int) -> Member:
        return self._members.get((kind, number), Member(kind, number))

    def _change(self, kind: Kind, number: int, **fields: Any) -> Member:
        changed = replace(self._record(kind, number), **fields)
        self._members[kind, number] = changed
        return changed
