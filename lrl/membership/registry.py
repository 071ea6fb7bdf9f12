"""The registry of a run: small files in its folder's `fleet/` by which other processes join and leave.

    run.json                    by the run           requirements of a generator, and the run's process
    generator-<n>.json          by a joining process the claim of the number; then the address
    generator-<n>.status.json   by the run           status of the generator
    generator-<n>.leave.json    by any process       a request to leave; the run removes the file when it has decided
    generator-<n>.stays.json    by the run           the reason to reject the request

The owner of an address file receives the run's token, so only this user's own files are trusted
(`lrl.runtime.owner_only_files`). The token itself is in no file. On the machine of the run the kernel shows it to the
run's own user (`lrl.membership.discovery`); on another machine the user has to bring it.
"""

import contextlib
import getpass
import logging
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lrl.generators.endpoint import Location
from lrl.membership.discovery import NotRunning, find_generators
from lrl.runtime.owner_only_files import OwnerOnlyFolder
from lrl.runtime.process_identity import ProcessIdentity

log = logging.getLogger(__name__)

FOLDER, RUN = "fleet", "run.json"
TOKEN_VARIABLE = "LRL_TOKEN"
BEAT_S = 5.0
"""Seconds between two signs of life of a run, for other machines."""
SILENT_S = 180.0
"""Seconds of silence after which a run has ended. NFS alone may keep a file's time back for a minute."""


@dataclass(frozen=True)
class Signed:
    """A record with the process that wrote it."""

    owner: ProcessIdentity = field(default_factory=ProcessIdentity, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.owner, dict):  # from JSON
            object.__setattr__(self, "owner", ProcessIdentity(**self.owner))


@dataclass(frozen=True)
class JoinSpec(Signed):
    """Requirements of a generator that joins the run."""

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
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that all processes of a transfer must have alike (`Transport.common_environment`)."""


@dataclass(frozen=True)
class Address(Location, Signed):
    """The address of a joining generator."""


@dataclass(frozen=True)
class MemberStatus:
    """The status of a generator that joined."""

    state: str
    """`waits` for a sync, `serves`, `left`, `lost`, or `refused` before it served."""
    version: int = -1
    """Its version at that time."""
    why: str = ""

    @property
    def over(self) -> bool:
        """Whether it is no longer a member of the run."""
        return self.state in {"left", "lost", "refused"}


class Registry:
    """The registry of the run in the folder `run`."""

    def __init__(self, run: Path) -> None:
        self.run = Path(run)
        self.files = OwnerOnlyFolder(self.run / FOLDER)
        self._shown = time.monotonic()
        self._heard = 0, time.monotonic()  # the run's last sign of life, and when it was first seen
        self._distrusted: set[int] = set()

    # ---- by the run

    def open(self, spec: JoinSpec) -> None:
        """Opens the registry and removes an earlier run's files; raises OSError if it cannot be written."""
        self.files.make()
        self.files.write(RUN, asdict(spec))

    def close(self) -> None:
        """Removes the registry; raises OSError if a file stays."""
        self.files.clear()
        self.files.path.rmdir()

    def poll(self) -> tuple[dict[int, Address], list[int]]:
        """Returns the addresses of joining generators, by number, and the numbers asked to leave; shows life."""
        if time.monotonic() - self._shown > BEAT_S:
            self._shown = time.monotonic()
            os.utime(self.files.path / RUN)
        self.files.check()
        found = {number: self._address(number) for number in self.files.numbers(r"generator-(\d+)\.json")}
        leaving = self.files.numbers(r"generator-(\d+)\.leave\.json")
        return {number: address for number, address in found.items() if address and address.url}, leaving

    def set_status(self, number: int, status: MemberStatus) -> None:
        """Writes the status of generator `number`."""
        self.files.write(f"generator-{number}.status.json", asdict(status))

    def answer_leave(self, number: int, why: str) -> None:
        """Answers the request to leave of generator `number`: the reason to reject it, or empty if it has left."""
        if why:
            self.files.write(f"generator-{number}.stays.json", {"why": why})
        self.files.remove(f"generator-{number}.leave.json")

    def _address(self, number: int) -> Address | None:
        try:
            return self.files.read(f"generator-{number}.json", Address)
        except FileNotFoundError:  # withdrawn meanwhile
            return None
        except OSError as error:
            if number not in self._distrusted:
                self._distrusted.add(number)
                log.warning("Generator %d may not join: %s", number, error)
            return None

    # ---- by a process that joins or asks

    def spec(self) -> JoinSpec:
        """Returns the run's requirements; raises NotRunning if there is no live run, or its file is not trusted."""
        try:
            spec = self.files.read(RUN, JoinSpec)
        except FileNotFoundError as error:
            raise NotRunning(
                f"{self.run} is not the folder of a live run (there is no {self.files.path / RUN}). Give the folder "
                "with the generator-<n>.log of one, on its own machine or on a file system that both share."
            ) from error
        except OSError as error:  # not trusted, or not readable
            raise NotRunning(str(error)) from error
        if spec.owner.ended:
            raise NotRunning(f"{self.run}: its run has ended, by a signal that left it no time to say so.")
        return spec

    def is_live(self, spec: JoinSpec) -> bool:
        """Whether the run of `spec` is live, as far as this machine can know."""
        try:
            current, beat = self.spec(), (self.files.path / RUN).stat().st_mtime_ns
        except (NotRunning, FileNotFoundError):
            return False
        if beat != self._heard[0]:
            self._heard = beat, time.monotonic()
        return current.run_id == spec.run_id and time.monotonic() - self._heard[1] < SILENT_S

    def claim(self, first: int) -> int:
        """Claims the lowest number from `first` on that no generator of the run has had."""
        number = first
        while self.status(number) or not self.files.write_new(f"generator-{number}.json", asdict(Address())):
            number += 1
        return number

    def announce(self, number: int, address: Address) -> None:
        """Writes the address of generator `number`."""
        self.files.write(f"generator-{number}.json", asdict(address))

    def withdraw(self, number: int) -> None:
        """Removes the address of generator `number`."""
        self.files.remove(f"generator-{number}.json")

    def ask_to_leave(self, number: int) -> None:
        """Requests that generator `number` leaves; see `leave_answer`."""
        self.files.remove(f"generator-{number}.stays.json")
        self.files.write_new(f"generator-{number}.leave.json", {})

    def leave_answer(self, number: int) -> str | None:
        """Returns why the run rejected the request to leave, empty if it did not; None until it has decided."""
        if (self.files.path / f"generator-{number}.leave.json").exists():
            return None
        try:
            return str(self.files.read(f"generator-{number}.stays.json", dict)["why"])
        except FileNotFoundError:
            return ""

    def status(self, number: int) -> MemberStatus | None:
        """Returns the status of generator `number`; None before the run has written one."""
        try:
            return self.files.read(f"generator-{number}.status.json", MemberStatus)
        except FileNotFoundError:
            return None

    def joined(self) -> list[int]:
        """Returns the numbers of the generators that joined and are members of the run."""
        statuses = {n: self.status(n) for n in self.files.numbers(r"generator-(\d+)\.json")}
        return [number for number, status in statuses.items() if status is not None and not status.over]

    def token(self, spec: JoinSpec) -> str:
        """Returns the run's token: from the kernel on its machine, else from `LRL_TOKEN` or typed without echo; raises
        NotRunning without one."""
        if spec.owner.here:
            if found := find_generators(self.run):
                return next(iter(found.values())).token
            raise NotRunning(
                f"{self.run}: the run's token is its generators', and none of them is running here at this moment. "
                "They may be starting: try again in a minute, as the user who started the run."
            )
        shown = f"on its machine, `lrl serve --chat {self.run}` shows it as OPENAI_API_KEY"
        token = os.environ.pop(TOKEN_VARIABLE, "")
        with contextlib.suppress(EOFError):  # a batch job has no keyboard; the error below gives the remedy
            token = token or getpass.getpass(f"The run's token ({shown}): ")
        if not token:
            raise NotRunning(
                f"{self.run}: its run is on another machine, and no token was typed. Without a keyboard, in a pipe or "
                f"a batch job, put it in the variable {TOKEN_VARIABLE}; {shown}."
            )
        return token
