"""A live run as another process sees it: requests to the registry on rank 0."""

import contextlib
import http.client
import json
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from lrl.errors import NotRunning
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind, Member
from lrl.members.service import LONGEST_NODE, MEMBERS, MODEL, RUN, TERMS
from lrl.system.auth import bearer
from lrl.system.endpoint import Location, connect

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

    def terms(self, kind: Kind) -> dict[str, Any]:
        """Returns what the workers of a member of this kind must know, as JSON."""
        return dict(self._ask("GET", f"{TERMS}/{kind}"))

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
