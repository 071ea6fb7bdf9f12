"""The HTTP routes of a run's registry, on rank 0, for `lrl.members.client`.

GET    /run                           requirements of a member
GET    /run/terms/<kind>              what its workers must know
GET    /run/model                     names and sizes of the model's files, if it is a folder
GET    /run/model/<name>              one of them
GET    /run/members/<kind>            numbers of those that joined
POST   /run/members/<kind>            takes a number
GET    /run/members/<kind>/<n>        what the run has made of it
PUT    /run/members/<kind>/<n>        says that it lives, and where; the answer is that of GET
DELETE /run/members/<kind>/<n>        its process has ended, and perhaps why
POST   /run/members/<kind>/<n>/leave  asks the run to remove it
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from lrl.members.member import Kind
from lrl.members.registry import Registry
from lrl.system.endpoint import Endpoint, Location
from lrl.system.token_server import TokenServer

RUN = "/run"
MODEL = f"{RUN}/model"
TERMS = f"{RUN}/terms"
MEMBERS = f"{RUN}/members"
KIND = f"/{{kind:{'|'.join(Kind)}}}"
ONE = MEMBERS + KIND + r"/{number:\d+}"
LONGEST_NODE = 64
REFUSALS = {
    Kind.SCORER: "it takes no scorers, as it trains nothing",
    Kind.ENVIRONMENT: (
        "it takes no environments: it has no data.environment, or agents elsewhere play"
    ),
}
"""Why a run has no terms for workers of a kind."""


class RegistryServer(TokenServer):
    """Serves a registry; see `TokenServer`.

    Args:
        registry: The registry.
        endpoint: The address that it listens on, and its TLS.
        token: The run's.
        port: Its port; 0 for a free one.
        terms: Returns what the workers of a kind must know, as JSON, for the kinds that the run
            takes.
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
        routes = [
            web.get(RUN, _answering(lambda request: asdict(registry.spec))),
            web.get(TERMS + KIND, _answering(lambda request: self._terms(_kind(request)))),
            web.get(MODEL, _answering(lambda request: self._sizes())),
            web.get(MODEL + "/{name}", self._file),
            web.get(MEMBERS + KIND, _answering(lambda request: registry.joined(_kind(request)))),
            web.post(MEMBERS + KIND, _answering(self._claim)),
            web.get(ONE, _answering(lambda request: asdict(registry.view(*_member_of(request))))),
            web.put(ONE, self._register),
            web.delete(ONE, self._withdraw),
            web.post(f"{ONE}/leave", self._leave),
        ]
        super().__init__(endpoint, token, routes, port)

    def _terms(self, kind: Kind) -> dict[str, Any]:
        if kind not in self._terms_of:
            raise web.HTTPNotFound(text=REFUSALS[kind])
        return self._terms_of[kind]()

    def _sizes(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._model_files()}

    def _claim(self, request: web.Request) -> int:
        kind = _kind(request)
        if not kind.has_weights:
            self._terms(kind)
        return self.registry.claim(kind)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        path = next((path for path in self._model_files() if path.name == name), None)
        if path is None:
            raise web.HTTPNotFound(text=f"the model of the run has no file {name!r}")
        return web.FileResponse(path, chunk_size=2**20)

    async def _register(self, request: web.Request) -> web.Response:
        try:
            words = await request.json()
            run, location = words.pop("run"), Location(**words.pop("location"))
            node, workers = str(words.pop("node")), int(words.pop("workers"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"no words of a member: {error!r}") from error
        if run != self.registry.spec.run_id:
            raise web.HTTPConflict(text="that number is another run's")
        if not node.isprintable() or len(node) > LONGEST_NODE:
            raise web.HTTPBadRequest(text="that is no name of a machine")
        try:
            member = self.registry.register(
                *_member_of(request), location, node=node, workers=workers
            )
            return web.json_response(asdict(member))
        except LookupError as error:
            raise web.HTTPConflict(text=str(error)) from error

    async def _withdraw(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.registry.withdraw(*_member_of(request), why=str(json.loads(text)) if text else "")
        return web.json_response({})

    async def _leave(self, request: web.Request) -> web.Response:
        self.registry.ask_to_leave(*_member_of(request), by_itself=await request.text() == "true")
        return web.json_response({})

    def _model_files(self) -> list[Path]:
        """The files at the top of the model's folder; none of a model with a hub name."""
        spec = self.registry.spec
        return (
            sorted(path for path in Path(spec.model).iterdir() if path.is_file())
            if spec.serves_model
            else []
        )


def _answering(find: Callable[[web.Request], Any]) -> Handler:
    """Returns a handler that responds with the result of `find`, as JSON."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(find(request))

    return answer


def _kind(request: web.Request) -> Kind:
    return Kind(request.match_info["kind"])


def _member_of(request: web.Request) -> tuple[Kind, int]:
    return _kind(request), int(request.match_info["number"])
