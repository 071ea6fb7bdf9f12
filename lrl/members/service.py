"""A run's registry over HTTP: the server on rank 0, and the client in any other process.

POST /run/<call>         one of `RegistryServer.calls`; takes and returns JSON
GET  /run/model/<name>   a file of the run's model
"""

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from lrl.errors import NoAnswer, NotRunning
from lrl.members.registry import JoinSpec, Kind, Member, Registry
from lrl.system.auth import bearer
from lrl.system.endpoint import Endpoint, Location, connect, is_loopback
from lrl.system.token_server import TokenServer

RUN = "/run"
MODEL = f"{RUN}/model"
LONGEST_NODE = 64
DEADLINE_S = 10.0
PIECE_BYTES = 2**20
"""Bytes of a file that are sent, or written, at once."""


class RegistryServer(TokenServer):
    """Serves a registry; see `TokenServer`.

    `terms` has the kinds of workers that the run takes, each with a function that returns what they
    must know, as JSON.
    """

    def __init__(
        self,
        registry: Registry,
        endpoint: Endpoint,
        token: str,
        port: int = 0,
        terms: Mapping[Kind, Callable[[], dict[str, Any]]] | None = None,
    ) -> None:
        self.registry = registry
        self._terms_of = terms or {}
        self.calls: dict[str, Callable[..., Any]] = {
            "spec": lambda: registry.spec,
            "terms": self._terms,
            "model": lambda: {path.name: path.stat().st_size for path in self._model_files()},
            "joined": registry.joined,
            "claim": self._claim,
            "view": registry.view,
            "register": self._register,
            "withdraw": registry.withdraw,
            "ask_to_leave": registry.ask_to_leave,
        }
        routes = [
            web.post(f"{RUN}/{{call:{'|'.join(self.calls)}}}", self._answer),
            web.get(MODEL + "/{name}", self._file),
        ]
        super().__init__(endpoint, token, routes, port)

    @property
    def elsewhere(self) -> Location:
        """Its location for other machines.

        A server that listens on all addresses is reached where the ranks of several nodes meet, or
        by this machine's name.
        """
        if not self.endpoint.is_everywhere:
            return self.location()
        meeting = os.environ.get("MASTER_ADDR", "")
        named = meeting and not is_loopback(meeting)
        return self.location(meeting if named else socket.gethostname())

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            words = await request.json()
            for name, typed in (("kind", Kind), ("number", int)):
                if name in words:
                    words[name] = typed(words[name])
            answer = self.calls[request.match_info["call"]](**words)
        except (TypeError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"malformed call: {error!r}") from error
        except LookupError as error:
            raise web.HTTPConflict(text=str(error)) from error
        return web.Response(
            text=json.dumps(answer, default=asdict), content_type="application/json"
        )

    def _terms(self, kind: Kind) -> dict[str, Any]:
        if kind not in self._terms_of:
            raise LookupError(f"the run takes no {kind}s")
        return self._terms_of[kind]()

    def _claim(self, kind: Kind) -> int:
        if not kind.has_weights:
            self._terms(kind)
        return self.registry.claim(kind)

    def _register(
        self, kind: Kind, number: int, run: str, location: Any, node: str, workers: int
    ) -> Member:
        if run != self.registry.spec.run_id:
            raise LookupError("that number is another run's")
        node = str(node)
        if not node.isprintable() or len(node) > LONGEST_NODE:
            raise ValueError("the name of the machine is not printable, or too long")
        where = Location(**location)
        return self.registry.register(kind, number, where, node=node, workers=int(workers))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        path = next((path for path in self._model_files() if path.name == name), None)
        if path is None:
            raise web.HTTPNotFound(text=f"the model of the run has no file {name!r}")
        return web.FileResponse(path, chunk_size=PIECE_BYTES)

    def _model_files(self) -> list[Path]:
        """The files at the top of the model's folder; none if the model is a hub name."""
        spec = self.registry.spec
        if not spec.serves_model:
            return []
        return sorted(path for path in Path(spec.model).iterdir() if path.is_file())


class RunClient:
    """The registry of the live run at `location`, from another process.

    Every method raises NoAnswer if the run does not answer within `DEADLINE_S`, and NotRunning if
    it rejects the request.
    """

    def __init__(self, location: Location, token: str) -> None:
        self.location = location
        self.token = token
        self._trust = location.context()

    def spec(self) -> JoinSpec:
        """Returns the run's requirements."""
        return JoinSpec(**self._ask("spec"))

    def terms(self, kind: Kind) -> dict[str, Any]:
        """Returns what the workers of a member of this kind must know, as JSON."""
        return dict(self._ask("terms", kind=kind))

    def joined(self, kind: Kind) -> list[int]:
        """See `Registry.joined`."""
        return list(self._ask("joined", kind=kind))

    def claim(self, kind: Kind) -> int:
        """See `Registry.claim`."""
        return int(self._ask("claim", kind=kind))

    def view(self, kind: Kind, number: int) -> Member:
        """See `Registry.view`."""
        return Member.from_json(self._ask("view", kind=kind, number=number))

    def register(
        self, kind: Kind, number: int, run_id: str, location: Location, workers: int = 0
    ) -> Member:
        """See `Registry.register`; for a member on this machine, of the run `run_id`."""
        words = {"run": run_id, "location": asdict(location), "workers": workers}
        node = socket.gethostname()[:LONGEST_NODE]
        return Member.from_json(self._ask("register", kind=kind, number=number, node=node, **words))

    def withdraw(self, kind: Kind, number: int, why: str = "") -> None:
        """See `Registry.withdraw`."""
        self._ask("withdraw", kind=kind, number=number, why=why)

    def ask_to_leave(self, kind: Kind, number: int, by_itself: bool = False) -> None:
        """See `Registry.ask_to_leave`; `view` has the answer."""
        self._ask("ask_to_leave", kind=kind, number=number, by_itself=by_itself)

    def fetch_model(self, folder: Path, interrupted: Callable[[], None] = lambda: None) -> None:
        """Copies the run's model into `folder`. Between pieces it calls `interrupted`, which may
        raise."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, size in self._ask("model").items():
            with (
                self._request("GET", f"{MODEL}/{name}") as response,
                (folder / Path(name).name).open("wb") as file,
            ):
                while piece := response.read(PIECE_BYTES):
                    file.write(piece)
                    interrupted()
                if file.tell() != size:
                    raise OSError(f"{name} broke off after {file.tell()} of {size} bytes")

    def _ask(self, call: str, **words: Any) -> Any:
        with self._request("POST", f"{RUN}/{call}", json.dumps(words)) as response:
            return json.loads(response.read())

    @contextlib.contextmanager
    def _request(
        self, method: str, route: str, body: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        url = self.location.url
        headers = {"Authorization": bearer(self.token), "Content-Type": "application/json"}
        with contextlib.closing(connect(url, self._trust, DEADLINE_S)) as connection:
            try:
                connection.request(method, route, body, headers)
                response = connection.getresponse()
                if response.status != http.client.OK:
                    why = response.read().decode(errors="replace")
                    raise NotRunning(f"{url} responded {response.status} on {route}: {why}")
                yield response
            except (OSError, http.client.HTTPException) as error:
                raise NoAnswer(
                    f"The run does not answer at {url} ({error!r}). It may have ended, or this "
                    "machine does not reach it there: strategy.server.host must be an address that "
                    "other machines reach."
                ) from error
