"""How a run and a process that is not the run's find and believe each other: small files in the run's `fleet/`.

    run.json                    by the run       what a generator must be to join, and where the run is
    generator-<n>.json          by a newcomer    the number is its own; then, where it answers
    generator-<n>.standing.json by the run       what became of it
    generator-<n>.leave.json    by whoever asks  it is to leave; the run removes the file when it has decided
    generator-<n>.stays.json    by the run       why it does not leave

Whoever could write an address there would be sent the run's token, so only this user's own files are believed
(`lrl.runtime.owner_only_files`). The token itself is in no file. On the machine of the run the kernel shows it to the
run's own user (`lrl.membership.discovery`); elsewhere the user has to bring it.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import ssl
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lrl.generators.endpoint import trust_text
from lrl.membership.discovery import NotRunning, find_generators
from lrl.runtime.owner_only_files import OwnerOnlyFolder
from lrl.runtime.process_identity import ProcessIdentity

log = logging.getLogger(__name__)

FOLDER, RUN = "fleet", "run.json"
TOKEN_VARIABLE = "LRL_TOKEN"
BEAT_S = 5.0
"""How often a run shows to other machines that it goes on."""
SILENT_S = 180.0
"""A run that has not shown it for so long has ended. NFS alone may keep a file's time back for a minute."""


@dataclass(frozen=True)
class Signed:
    """What says which process wrote it."""

    owner: ProcessIdentity = field(default_factory=ProcessIdentity, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.owner, dict):  # as JSON has it
            object.__setattr__(self, "owner", ProcessIdentity(**self.owner))


@dataclass(frozen=True)
class JoinSpec(Signed):
    """What a generator must be to join the run."""

    model: str
    """Folder or hub name."""
    settings: dict[str, Any]
    """The fields of `ServerSettings`."""
    transport: str
    """One of `lrl.weights.TRANSPORTS`."""
    run_id: str
    on_cpu: bool
    generators: int
    """How many the run started; newcomers are counted from there."""


@dataclass(frozen=True)
class Address(Signed):
    """Where a newcomer responses."""

    url: str = ""
    """Empty while it starts."""
    trust: str = "nobody"
    """`certificate`, `system` (see `ServerSettings.tls_trust`), or `nobody` without TLS."""
    certificate: str = ""
    """The text of the PEM file."""

    def context(self) -> ssl.SSLContext | None:
        """Whom a client of it believes."""
        if self.trust == "nobody":
            return None
        return ssl.create_default_context() if self.trust == "system" else trust_text(self.certificate)


@dataclass(frozen=True)
class MemberStatus:
    """What became of a generator."""

    state: str
    """`waits` for a sync, `serves`, `left`, `lost`, or `refused` before it served."""
    version: int = -1
    """What it held then."""
    why: str = ""

    @property
    def over(self) -> bool:
        """Whether it has no place in the run any more."""
        return self.state in {"left", "lost", "refused"}


@dataclass(frozen=True)
class LeaveRejected:
    """Why a generator stays that was to leave."""

    why: str


class Registry:
    """The files of one run.

    Args:
        run: The run's folder.
    """

    def __init__(self, run: Path) -> None:
        self.run = Path(run)
        self.files = OwnerOnlyFolder(self.run / FOLDER)
        self._shown = time.monotonic()
        self._heard = 0, time.monotonic()  # the run's last beat, and when it came
        self._doubted: set[int] = set()

    # ---- the run's end

    def open(self, spec: JoinSpec) -> None:
        """Be found from now on; what an earlier run left goes. Raises OSError if there can be no such folder."""
        self.files.make()
        self.files.write(RUN, asdict(spec))

    def close(self) -> None:
        """The run has ended. Raises OSError if a file stays."""
        self.files.clear()
        self.files.path.rmdir()

    def look(self) -> tuple[dict[int, Address], list[int]]:
        """Where each newcomer responses, by number, and who is asked to leave; shows that the run goes on."""
        if time.monotonic() - self._shown > BEAT_S:
            self._shown = time.monotonic()
            os.utime(self.files.path / RUN)
        self.files.check()
        found = {number: self._address(number) for number in self.files.numbers(r"generator-(\d+)\.json")}
        leaving = self.files.numbers(r"generator-(\d+)\.leave\.json")
        return {number: address for number, address in found.items() if address and address.url}, leaving

    def decide(self, number: int, status: MemberStatus) -> None:
        """Say what became of generator `number`."""
        self.files.write(f"generator-{number}.standing.json", asdict(status))

    def response(self, number: int, why: str) -> None:
        """Answer the wish that generator `number` leaves: why it does not, or nothing if it has left."""
        if why:
            self.files.write(f"generator-{number}.stays.json", {"why": why})
        self.files.remove(f"generator-{number}.leave.json")

    def _address(self, number: int) -> Address | None:
        try:
            return self.files.read(f"generator-{number}.json", Address)
        except FileNotFoundError:  # withdrawn meanwhile
            return None
        except OSError as error:
            if number not in self._doubted:
                self._doubted.add(number)
                log.warning("Generator %d may not join: %s", number, error)
            return None

    # ---- the end of who joins or asks

    def spec(self) -> JoinSpec:
        """What the run asks of a generator; raises NotRunning if no run goes on there, or it is not believed."""
        try:
            spec = self.files.read(RUN, JoinSpec)
        except FileNotFoundError as error:
            raise NotRunning(
                f"{self.run} is not the folder of a run that goes on (there is no {self.files.path / RUN}). Give the "
                "folder with the generator-<n>.log of one, on its own machine or on a file system that both share."
            ) from error
        except OSError as error:  # NotBelieved, or not even to be read
            raise NotRunning(str(error)) from error
        if spec.owner.ended:
            raise NotRunning(f"{self.run}: its run has ended, by a signal that left it no time to say so.")
        return spec

    def goes_on(self, spec: JoinSpec) -> bool:
        """Whether the run of `spec` goes on, as far as this machine can know."""
        try:
            current, beat = self.spec(), (self.files.path / RUN).stat().st_mtime_ns
        except (NotRunning, FileNotFoundError):
            return False
        if beat != self._heard[0]:
            self._heard = beat, time.monotonic()
        return current.run_id == spec.run_id and time.monotonic() - self._heard[1] < SILENT_S

    def claim(self, first: int) -> int:
        """A number from `first` on that no generator of the run has had; it is this process's now."""
        number = first
        while self.status(number) or not self.files.write_new(f"generator-{number}.json", asdict(Address())):
            number += 1
        return number

    def announce(self, number: int, address: Address) -> None:
        """Generator `number` answers at `address`."""
        self.files.write(f"generator-{number}.json", asdict(address))

    def withdraw(self, number: int) -> None:
        """Generator `number` has ended."""
        self.files.remove(f"generator-{number}.json")

    def ask_to_leave(self, number: int) -> None:
        """Ask the run to let generator `number` go; `refusal` has the response."""
        self.files.remove(f"generator-{number}.stays.json")
        self.files.write_new(f"generator-{number}.leave.json", {})

    def refusal(self, number: int) -> str | None:
        """Why the run did not let generator `number` go, empty if it did; None as long as it has not decided."""
        if self.files.has(f"generator-{number}.leave.json"):
            return None
        try:
            return self.files.read(f"generator-{number}.stays.json", LeaveRejected).why
        except FileNotFoundError:
            return ""

    def status(self, number: int) -> MemberStatus | None:
        """What became of generator `number`; None if the run has not said."""
        try:
            return self.files.read(f"generator-{number}.standing.json", MemberStatus)
        except FileNotFoundError:
            return None

    def joined(self) -> list[int]:
        """The numbers of the generators that joined and have a place in the run."""
        standings = {n: self.status(n) for n in self.files.numbers(r"generator-(\d+)\.json")}
        return [number for number, status in standings.items() if status is not None and not status.over]

    def _typed_token(self) -> str:
        shown = f"on its machine, `lrl serve --chat {self.run}` shows it as OPENAI_API_KEY"
        token = ""
        with contextlib.suppress(EOFError):  # a batch job has no keyboard; the error below says what to do
            token = getpass.getpass(f"The run's token ({shown}): ")
        if not token:
            raise NotRunning(
                f"{self.run}: its run is on another machine, and nobody has typed its token. Without a keyboard, in a "
                f"pipe or a batch job, put it in the variable {TOKEN_VARIABLE}; {shown}."
            )
        return token

    def token(self, spec: JoinSpec) -> str:
        """The run's token: on its machine from the kernel, elsewhere from `LRL_TOKEN` or, unseen, from the keyboard.

        Raises:
            NotRunning: No generator of the run is there to have it from, or nobody has typed it.
        """
        if not spec.owner.here:
            return os.environ.pop(TOKEN_VARIABLE, "") or self._typed_token()
        if found := find_generators(self.run):
            return next(iter(found.values())).token
        raise NotRunning(
            f"{self.run}: the run's token is its generators', and none of them is running here at this moment. They "
            "may be starting: try again in a minute, as the user who started the run."
        )
