"""The registry of a run: the generators that other processes bring, on rank 0.

A process that joins takes a number, says again and again where its generator is, and reads what the run has made of it
(`lrl.membership.client`, over `lrl.membership.service`). The run reads and answers on its side
(`lrl.membership.admission`). Each method may be called on any thread.
"""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from lrl.generators.endpoint import Location
from lrl.runtime.process_identity import ProcessIdentity

LEASE_S = 10.0
"""Seconds of silence after which a process that joined has ended; it speaks twice a second."""

END_S = 2.0
"""Seconds that a run waits at its end until they have heard of it."""


@dataclass(frozen=True)
class JoinSpec:
    """Requirements of a generator that joins the run; travels as JSON."""

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
    """Variables that all processes of a transfer must have alike (`Transport.common_environment`)."""
    serves_model: bool = False
    """Whether `model` is a folder, whose files the run gives to other machines."""
    owner: ProcessIdentity = field(default_factory=ProcessIdentity)
    """The run's process."""

    def __post_init__(self) -> None:
        if isinstance(self.owner, dict):  # from JSON
            object.__setattr__(self, "owner", ProcessIdentity(**self.owner))


@dataclass(frozen=True)
class MemberStatus:
    """The status of a generator that joined."""

    state: str
    """`waits` for a sync, `serves`, `left`, `lost`, `refused` before it served, or `ended` with the run."""
    version: int = -1
    """Its version at that time."""
    why: str = ""

    @property
    def over(self) -> bool:
        """Whether it is no longer a member of the run."""
        return self.state in {"left", "lost", "refused", "ended"}


@dataclass(frozen=True)
class View:
    """The entry of a generator, as other processes read it; travels as JSON."""

    status: MemberStatus | None = None
    """None before the run has reached it."""
    leaving: bool = False
    """Whether the run has yet to decide about a request to leave."""
    why_it_stays: str = ""
    """The reason with which the run rejected the last request to leave."""


@dataclass
class _Entry:
    location: Location = field(default_factory=Location)
    heard: float = 0.0
    view: View = field(default_factory=View)


class Registry:
    """The registry; `spec` says what a joining generator must have."""

    def __init__(self, spec: JoinSpec) -> None:
        self.spec = spec
        self._entries: dict[int, _Entry] = {}
        self._numbers = spec.generators
        self._lock = threading.Lock()

    # ---- for processes that join or ask

    def claim(self) -> int:
        """Returns a number that no generator of the run has had."""
        with self._lock:
            number, self._numbers = self._numbers, self._numbers + 1
            self._entries[number] = _Entry(heard=time.monotonic())
            return number

    def register(self, number: int, location: Location) -> View:
        """Notes that generator `number` lives, and where; an empty URL says that it starts.

        Raises:
            LookupError: Nobody has claimed that number.
        """
        with self._lock:
            if not self.spec.generators <= number < self._numbers:
                raise LookupError(f"nobody has taken the number {number} for a generator that joins")
            entry = self._entries[number]
            entry.location, entry.heard = location, time.monotonic()
            return entry.view

    def withdraw(self, number: int) -> None:
        """Notes that the process of generator `number` has ended."""
        with self._lock:
            self._entries.setdefault(number, _Entry()).heard = 0.0

    def ask_to_leave(self, number: int) -> None:
        """Notes a request that generator `number` leaves; the run's own have entries from then on."""
        with self._lock:
            entry = self._entries.setdefault(number, _Entry())
            entry.view = View(entry.view.status, leaving=True)

    def view(self, number: int) -> View:
        """Returns what is known of generator `number`."""
        with self._lock:
            return self._entries.get(number, _Entry()).view

    def status(self, number: int) -> MemberStatus | None:
        """Returns the status of generator `number`; None before the run has reached it."""
        return self.view(number).status

    @property
    def refusal(self) -> str:
        """Why the last generator that was refused may not join; empty if there is none."""
        with self._lock:
            found = [entry.view.status for entry in self._entries.values()]
        return next((status.why for status in reversed(found) if status and status.state == "refused"), "")

    def joined(self) -> list[int]:
        """Returns the numbers of the generators that joined and are members of the run."""
        with self._lock:
            found = {number: entry.view.status for number, entry in self._entries.items()}
        return [n for n, status in found.items() if n >= self.spec.generators and status and not status.over]

    # ---- for the run

    def locations(self) -> dict[int, Location]:
        """Returns where the generators are whose processes live, by number."""
        with self._lock:
            living = {n: each for n, each in self._entries.items() if time.monotonic() - each.heard < LEASE_S}
            return {number: entry.location for number, entry in living.items() if entry.location.url}

    def leaving(self) -> list[int]:
        """Returns the numbers of the generators that are asked to leave."""
        with self._lock:
            return [number for number, entry in self._entries.items() if entry.view.leaving]

    def set_status(self, number: int, status: MemberStatus) -> None:
        """Notes the status of generator `number`."""
        with self._lock:
            entry = self._entries.setdefault(number, _Entry())
            entry.view = View(status, entry.view.leaving, entry.view.why_it_stays)

    def end(self) -> None:
        """Tells all generators that the run ends, and waits a moment until they know."""
        with self._lock:
            said = time.monotonic()
            for entry in self._entries.values():
                if entry.view.status is None or not entry.view.status.over:
                    entry.view = View(MemberStatus("ended"))
        while time.monotonic() - said < END_S:
            with self._lock:
                silent = [each for each in self._entries.values() if said - LEASE_S < each.heard <= said]
            if not silent:
                return
            time.sleep(0.05)

    def answer_leave(self, number: int, why: str) -> None:
        """Answers the request to leave of generator `number`: the reason to reject it, or empty if it has left."""
        with self._lock:
            entry = self._entries[number]
            entry.view = View(entry.view.status, leaving=False, why_it_stays=why)
