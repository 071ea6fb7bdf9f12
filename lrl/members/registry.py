"""The registry of a run, on rank 0: its members of all kinds.

A process that joins claims a number, then keeps reporting where its server is and reads its status
in the answer (`lrl.members.service`). `lrl.members.admission` changes that status.
"""

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from lrl.system.endpoint import Location
from lrl.system.processes import ProcessIdentity

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""Seconds of silence after which a member has ended; it speaks twice a second."""
END_S = 2.0
"""Seconds that a run waits at its end until its members have heard of it."""


class Kind(StrEnum):
    """The work of a member."""

    GENERATOR = "generator"
    WORKER = "worker"

    @property
    def has_weights(self) -> bool:
        """Whether it has the policy's weights. Others run the user's code, rewards or the environment
        (`lrl.workers`)."""
        return self is Kind.GENERATOR


class Status(StrEnum):
    """The status of a member.

        STARTING ── admitted ──▶ PENDING ── a sync ──▶ SERVING ── asked to leave ──▶ LEFT
            │                       │                     │
            └──── cannot serve ─────┤                     └── silent, or at fault ──▶ LOST
                                    ▼                                                  │
                                 REFUSED           one without weights speaks again ◀──┘
                                                   (STARTING)

    A member without weights is never PENDING, and may come back. Every member that is not over
    becomes ENDED with the run.
    """

    STARTING = "starting"
    """Its server starts, or has not answered the run yet."""
    PENDING = "pending"
    """It waits for a sync, and to be proved."""
    SERVING = "serving"
    """It gets requests."""
    LEFT = "left"
    """It has left at the request of a user or a signal."""
    LOST = "lost"
    """It has served, and no longer does."""
    REFUSED = "refused"
    """It has never served, and cannot."""
    ENDED = "ended"
    """The run is over."""

    @property
    def over(self) -> bool:
        """Whether it is no longer a member of the run."""
        return self in (Status.LEFT, Status.LOST, Status.REFUSED, Status.ENDED)


@dataclass(frozen=True)
class JoinSpec:
    """The settings that a member must share with its run; travels as JSON."""

    model: str
    """Folder or hub name."""
    settings: dict[str, Any]
    """The fields of `ServerSettings`."""
    transport: str
    """One of `lrl.weights.TRANSPORTS`."""
    run_id: str
    on_cpu: bool
    generators: int
    """Number of generators that the run started; joining ones are numbered from there."""
    seed: int = 0
    """The run's (`lrl.generators.seeds.run_seed`)."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that all ends of a transfer must have alike (`Transport.common_environment`)."""
    serves_model: bool = False
    """Whether `model` is a folder, whose files the run gives to other machines."""
    owner: ProcessIdentity = field(default_factory=ProcessIdentity)
    """The run's process."""

    def __post_init__(self) -> None:
        if isinstance(self.owner, dict):  # from JSON
            object.__setattr__(self, "owner", ProcessIdentity(**self.owner))


@dataclass(frozen=True)
class Member:
    """A process that others started and that registers at rank 0, as its run sees it; travels as
    JSON."""

    kind: Kind
    number: int
    """Unique among the members of its kind; never used twice in a run."""
    location: Location = field(default_factory=Location)
    """Its URL is empty while its server starts."""
    node: str = ""
    """The name of its machine."""
    workers: int = 0
    """Processes of a member without weights."""
    heard: float = 0.0
    """When it last spoke, on rank 0's monotonic clock; its lease ends `LEASE_S` later."""
    status: Status = Status.STARTING
    version: int = -1
    """A generator's policy version when it came to its status."""
    why: str = ""
    """The reason of its status."""
    leaving: bool = False
    """Whether a request to leave is pending."""
    by_itself: bool = False
    """Whether its own process asked to leave, at a signal: a launcher's job is then replaced."""
    leave_refusal: str = ""
    """Why the run rejected the last request to leave."""

    @property
    def name(self) -> str:
        """Its name in errors and logs."""
        return f"{self.kind} {self.number}"

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Member":
        """Returns the member of these fields."""
        typed = {
            "kind": Kind(fields["kind"]),
            "status": Status(fields["status"]),
            "location": Location(**fields["location"]),
        }
        return cls(**fields | typed)


class Registry:
    """The members of a run, which must meet `spec`. Any thread may call any method."""

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
        """Renews the lease of a member, and returns the run's record of it.

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
        """Notes the end of a member's process; one that has not served and gives a reason is
        refused."""
        with self._lock:
            member = self._change(kind, number, heard=0.0)
            if why and member.status in (Status.STARTING, Status.PENDING):
                refusal = f"{member.name.capitalize()} on {member.node} cannot serve: {why}"
                log.warning("%s", refusal)
                self._change(kind, number, status=Status.REFUSED, why=refusal)

    def ask_to_leave(self, kind: Kind, number: int, by_itself: bool = False) -> None:
        """Notes a request that a member leaves, `by_itself` if its own process asks, at a signal.

        The run's own generators have entries from then on.
        """
        with self._lock:
            self._change(kind, number, leaving=True, leave_refusal="", by_itself=by_itself)

    def view(self, kind: Kind, number: int) -> Member:
        """Returns the run's record of a member."""
        with self._lock:
            return self._record(kind, number)

    def joined(self, kind: Kind) -> list[int]:
        """Returns the numbers of the members of this kind that the run has admitted."""
        admitted = (Status.PENDING, Status.SERVING)
        return [each.number for each in self._all(kind) if each.status in admitted]

    # ---- for the run

    def alive(self, kind: Kind) -> dict[int, Member]:
        """Returns the members with a lease and an address, by number."""
        now = time.monotonic()
        return {
            each.number: each
            for each in self._all(kind)
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
        found = [each.why for each in self._all(kind) if each.status is Status.REFUSED]
        return found[-1] if found else ""

    def set_status(
        self, kind: Kind, number: int, status: Status, version: int = -1, why: str = ""
    ) -> None:
        """Notes the status of a member; one that has ended with the run stays so."""
        with self._lock:
            if self._record(kind, number).status is not Status.ENDED:
                self._change(kind, number, status=status, version=version, why=why)

    def answer_leave(self, kind: Kind, number: int, refusal: str = "") -> None:
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

    def _all(self, kind: Kind) -> list[Member]:
        """All members that have ever joined, in the order of their numbers."""
        with self._lock:
            return [
                self._record(kind, number)
                for number in range(self._first(kind), self._numbers[kind])
            ]

    def _first(self, kind: Kind) -> int:
        """The first number of those that join; the run's own generators have the ones before."""
        return self.spec.generators if kind is Kind.GENERATOR else 0

    def _record(self, kind: Kind, number: int) -> Member:
        return self._members.get((kind, number), Member(kind, number))

    def _change(self, kind: Kind, number: int, **fields: Any) -> Member:
        changed = replace(self._record(kind, number), **fields)
        self._members[kind, number] = changed
        return changed
