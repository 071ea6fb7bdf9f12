"""A member of a run: a process that somebody else starts and that registers at rank 0."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lrl.system.endpoint import Location

LEASE_S = 10.0
"""Seconds of silence after which a member has ended; it speaks twice a second."""


class Kind(StrEnum):
    """The work of a member."""

    GENERATOR = "generator"
    SCORER = "scorer"
    ENVIRONMENT = "environment"

    @property
    def has_weights(self) -> bool:
        """Whether it has the policy's weights. Others have workers, to which rank 0 gives work
        (`lrl.system.remote_workers`)."""
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
    """It waits for a sync, and for the probe that proves it."""
    SERVING = "serving"
    """It gets requests."""
    LEFT = "left"
    """It has left at the request of a user or a signal."""
    LOST = "lost"
    """It has served, and does not any more."""
    REFUSED = "refused"
    """It has never served, and cannot."""
    ENDED = "ended"
    """The run is over."""

    @property
    def over(self) -> bool:
        """Whether it is no longer a member of the run."""
        return self in (Status.LEFT, Status.LOST, Status.REFUSED, Status.ENDED)


@dataclass(frozen=True)
class Member:
    """A member as its run sees it; travels as JSON."""

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
    """Whether the run has yet to decide about a request to leave."""
    by_itself: bool = False
    """Whether its own process asked to leave, at a signal: a launcher's job is then replaced."""
    leave_refusal: str = ""
    """The reason for which the run rejected the last request to leave."""

    @property
    def name(self) -> str:
        """Its name in errors and logs."""
        return f"{self.kind} {self.number}"

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Member":
        """Returns the member of these fields; raises KeyError, TypeError or ValueError for
        others."""
        typed = {
            "kind": Kind(fields["kind"]),
            "status": Status(fields["status"]),
            "location": Location(**fields["location"]),
        }
        return cls(**fields | typed)
