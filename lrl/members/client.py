"""A live run as another process sees it: requests to the registry on rank 0."""

import contextlib
import getpass
import http.client
import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lrl.errors import NotRunning
from lrl.members.discovery import find_generators
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind, Member
from lrl.members.run_file import CERTIFICATE_VARIABLE, TOKEN_VARIABLE, read_run_file
from lrl.members.service import LONGEST_NODE, MEMBERS, MODEL, RUN, SCORING
from lrl.system.auth import bearer
from lrl.system.endpoint import Location, connect, first_certificate

T = TypeVar("T")
DEADLINE_S = 10.0
PIECE_BYTES = 2**20
"""Bytes that are written at once."""


class RunClient:
    """The registry of the run at `location`.

    Every method raises OSError if the run does not answer within `DEADLINE_S`, and NotRunning if it
    rejects the request.
    """

    def __init__(self, location: Location, token: str) -> None:
        self.location = location
        self.token = token
        self._trust = location.context()

    def spec(self) -> JoinSpec:
        """Returns the run's requirements."""
        return self._typed(RUN, lambda fields: JoinSpec(**fields))

    def scoring(self) -> dict[str, Any]:
        """Returns the rewards and limits of a scorer, as JSON (`lrl.rewards.job.ScoringTerms`)."""
        return dict(self._ask("GET", SCORING))

    def claim(self, kind: Kind) -> int:
        """Takes a number that no member of this kind has had."""
        return int(self._ask("POST", f"{MEMBERS}/{kind}"))

    def register(
        self, kind: Kind, number: int, run_id: str, location: Location, workers: int = 0
    ) -> Member:
        """Registers a member of this machine under its URL, which is empty while the member
        starts."""
        words = {"run": run_id, "location": asdict(location), "workers": workers}
        words["node"] = socket.gethostname()[:LONGEST_NODE]
        return Member.from_json(self._ask("PUT", _route(kind, number), words))

    def withdraw(self, kind: Kind, number: int, why: str = "") -> None:
        """Reports the end of a member's process, with the reason if it could not serve."""
        self._ask("DELETE", _route(kind, number), why or None)

    def ask_to_leave(self, kind: Kind, number: int, by_itself: bool = False) -> None:
        """Requests a member's leave; see `view`, and `Registry.ask_to_leave`."""
        self._ask("POST", f"{_route(kind, number)}/leave", by_itself)

    def view(self, kind: Kind, number: int) -> Member:
        """Returns the run's record of a member."""
        return self._typed(_route(kind, number), Member.from_json)

    def joined(self, kind: Kind) -> list[int]:
        """Returns the numbers of this kind's members that the run has admitted."""
        return list(self._ask("GET", f"{MEMBERS}/{kind}"))

    def fetch_model(self, folder: Path, interrupted: Callable[[], None] = lambda: None) -> None:
        """Copies the run's model into `folder`; calls `interrupted`, which may raise, between
        pieces."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, size in self._ask("GET", MODEL).items():
            with (
                self._request("GET", f"{MODEL}/{name}") as response,
                (folder / Path(name).name).open("wb") as file,
            ):
                while piece := response.read(PIECE_BYTES):
                    file.write(piece)
                    interrupted()
                if file.tell() != size:
                    raise OSError(
                        f"{name} of the run's model broke off after {file.tell()} of {size} bytes"
                    )

    def _typed(self, route: str, read: Callable[[dict[str, Any]], T]) -> T:
        try:
            return read(self._ask("GET", route))
        except (KeyError, TypeError, ValueError) as error:
            raise NotRunning(
                f"{self.location.url} is of another release of lrl ({error}): use the run's."
            ) from error

    def _ask(self, method: str, route: str, body: Any = None) -> Any:
        with self._request(method, route, body) as response:
            return json.loads(response.read())

    @contextlib.contextmanager
    def _request(self, method: str, route: str, body: Any = None) -> Any:
        headers = {"Authorization": bearer(self.token), "Content-Type": "application/json"}
        with contextlib.closing(connect(self.location.url, self._trust, DEADLINE_S)) as connection:
            try:
                connection.request(
                    method, route, json.dumps(body) if body is not None else None, headers
                )
                response = connection.getresponse()
                if response.status == http.client.UNAUTHORIZED:
                    raise NotRunning(
                        f"{self.location.url}: the token is not the run's (LRL_TOKEN)."
                    )
                if response.status != http.client.OK:
                    text = response.read().decode(errors="replace")
                    raise NotRunning(
                        f"{self.location.url} responded {response.status} on {route}: {text}"
                    )
                yield response
            except http.client.HTTPException as error:
                raise OSError(f"{self.location.url} broke off: {error!r}") from error


def _route(kind: Kind, number: int) -> str:
    return f"{MEMBERS}/{kind}/{number}"


def find_run(run: str, certificate: str | None = None) -> RunClient:
    """Returns the live run in the folder `run` or at the URL `run`.

    Args:
        run: Folder or URL.
        certificate: The PEM file by which to know a URL's server; without it the text in
            `CERTIFICATE_VARIABLE`, or else the system's CAs.

    Raises:
        NotRunning: There is no live run, its file is not trusted, or nobody gave the token.
    """
    if "://" in run:
        return RunClient(_location_of(run, certificate), _typed_token(run))
    found = read_run_file(Path(run))
    if found.owner.ended:
        raise NotRunning(f"{run}: its run has ended, by a signal that left it no time to say so.")
    if found.owner.here:
        return RunClient(found, _token_here(Path(run)))
    return RunClient(Location(found.elsewhere, found.trust, found.certificate), _typed_token(run))


def _location_of(url: str, certificate: str | None) -> Location:
    address = urlsplit(url)
    if (
        address.scheme not in ("http", "https")
        or not address.hostname
        or address.port is None
        or address.path
    ):
        raise NotRunning(
            f"{url} is no address of a run: give https://ADDRESS:PORT, as the run has printed it."
        )
    if address.scheme == "http":
        return Location(url)
    text = (
        first_certificate(certificate) if certificate else os.environ.get(CERTIFICATE_VARIABLE, "")
    )
    return Location(url, "certificate", text) if text else Location(url, "system")


def _token_here(run: Path) -> str:
    if found := find_generators(run):
        return next(iter(found.values())).token
    if token := os.environ.pop(TOKEN_VARIABLE, ""):
        return token
    raise NotRunning(
        f"{run}: the run's token is its generators', and none of them is running here at this "
        "moment. They may be starting: try again in a minute, as the user who started the run. If "
        f"the run was started with {TOKEN_VARIABLE}, set it here, too."
    )


def _typed_token(run: str) -> str:
    shown = "on its machine, `lrl prompt FOLDER` shows it as OPENAI_API_KEY"
    token = os.environ.pop(TOKEN_VARIABLE, "")
    # A batch job has no keyboard; the error below gives the remedy.
    with contextlib.suppress(EOFError):
        token = token or getpass.getpass(f"The run's token ({shown}): ")
    if not token:
        raise NotRunning(
            f"{run}: its run is on another machine, and no token was typed. Without a keyboard, in "
            f"a pipe or a batch job, put it in the variable {TOKEN_VARIABLE}; {shown}."
        )
    return token
