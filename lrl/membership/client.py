"""A live run as another process sees it: requests to the registry on rank 0."""

import contextlib
import http.client
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lrl.generators.auth import bearer
from lrl.generators.endpoint import Location, connect
from lrl.membership.discovery import NotRunning
from lrl.membership.registry import JoinSpec, MemberStatus, View
from lrl.membership.service import GENERATORS, MODEL, RUN

DEADLINE_S = 10.0
PIECE = 2**20
"""Bytes that are written at once."""


class RunClient:
    """The registry of the run at `location`.

    Every method raises OSError if the run does not answer within `DEADLINE_S`, and NotRunning if it rejects the
    request.
    """

    def __init__(self, location: Location, token: str) -> None:
        self.location, self.token = location, token
        self._trust = location.context()

    def spec(self) -> JoinSpec:
        """Returns the run's requirements."""
        try:
            return JoinSpec(**self._ask("GET", RUN))
        except TypeError as error:
            raise NotRunning(f"{self.location.url} is of another release of lrl ({error}): use the run's.") from error

    def claim(self) -> int:
        """Takes a number that no generator of the run has had."""
        return int(self._ask("POST", GENERATORS))

    def register(self, number: int, location: Location) -> View:
        """Says that generator `number` lives, and where; an empty URL says that it starts."""
        return _view(self._ask("PUT", f"{GENERATORS}/{number}", asdict(location)))

    def withdraw(self, number: int) -> None:
        """Says that the process of generator `number` has ended."""
        self._ask("DELETE", f"{GENERATORS}/{number}")

    def ask_to_leave(self, number: int) -> None:
        """Requests that generator `number` leaves; see `view`."""
        self._ask("POST", f"{GENERATORS}/{number}/leave")

    def view(self, number: int) -> View:
        """Returns what the run has made of generator `number`."""
        return _view(self._ask("GET", f"{GENERATORS}/{number}"))

    def joined(self) -> list[int]:
        """Returns the numbers of the generators that joined and are members of the run."""
        return list(self._ask("GET", GENERATORS))

    def fetch_model(self, folder: Path, interrupted: Callable[[], None] = lambda: None) -> None:
        """Copies the files of the run's model into `folder`; `interrupted` is called between pieces and may raise."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, size in self._ask("GET", MODEL).items():
            with self._request("GET", f"{MODEL}/{name}") as response, (folder / Path(name).name).open("wb") as file:
                while piece := response.read(PIECE):
                    file.write(piece)
                    interrupted()
                if file.tell() != size:
                    raise OSError(f"{name} of the run's model broke off after {file.tell()} of {size} bytes")

    def _ask(self, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
        with self._request(method, route, body) as response:
            return json.loads(response.read())

    @contextlib.contextmanager
    def _request(self, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Authorization": bearer(self.token), "Content-Type": "application/json"}
        with contextlib.closing(connect(self.location.url, self._trust, DEADLINE_S)) as connection:
            try:
                connection.request(method, route, json.dumps(body) if body is not None else None, headers)
                response = connection.getresponse()
                if response.status == http.client.UNAUTHORIZED:
                    raise NotRunning(f"{self.location.url}: the token is not the run's (LRL_TOKEN).")
                if response.status != http.client.OK:
                    said = response.read().decode(errors="replace")
                    raise NotRunning(f"{self.location.url} responded {response.status} on {route}: {said}")
                yield response
            except http.client.HTTPException as error:
                raise OSError(f"{self.location.url} broke off: {error!r}") from error


def _view(fields: dict[str, Any]) -> View:
    status = fields.pop("status")
    return View(MemberStatus(**status) if status else None, **fields)
