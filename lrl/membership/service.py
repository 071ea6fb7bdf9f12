"""The HTTP side of a run's registry, on rank 0: what `lrl.membership.client` asks.

GET    /run                      requirements of a generator
GET    /run/model                names and sizes of the model's files, if it is a folder
GET    /run/model/<name>         one of them
GET    /run/generators           numbers of those that joined
POST   /run/generators           takes a number
GET    /run/generators/<n>       what the run has made of it
PUT    /run/generators/<n>       says that it lives, and where; the answer is that of GET
DELETE /run/generators/<n>       its process has ended
POST   /run/generators/<n>/leave asks the run to remove it

Reward hosts join at a route of theirs on the same server (`lrl.rewards.host_route`).
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from aiohttp import web

from lrl.generators.endpoint import Endpoint, Location
from lrl.generators.token_server import TokenServer
from lrl.membership.registry import Registry

RUN = "/run"
MODEL, GENERATORS = f"{RUN}/model", f"{RUN}/generators"
ONE = GENERATORS + r"/{number:\d+}"


class RegistryServer(TokenServer):
    """Serves a registry, and `more` routes; see `TokenServer`."""

    def __init__(
        self, registry: Registry, endpoint: Endpoint, token: str, port: int = 0, more: Sequence[web.RouteDef] = ()
    ) -> None:
        self.registry = registry
        routes = [
            web.get(RUN, self._spec),
            web.get(MODEL, self._files),
            web.get(MODEL + "/{name}", self._file),
            web.get(GENERATORS, self._joined),
            web.post(GENERATORS, self._claim),
            web.get(ONE, self._view),
            web.put(ONE, self._register),
            web.delete(ONE, self._withdraw),
            web.post(f"{ONE}/leave", self._leave),
            *more,
        ]
        super().__init__(endpoint, token, routes, port)

    async def _spec(self, request: web.Request) -> web.Response:
        return web.json_response(asdict(self.registry.spec))

    async def _files(self, request: web.Request) -> web.Response:
        return web.json_response({path.name: path.stat().st_size for path in self._model_files()})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        path = next((path for path in self._model_files() if path.name == name), None)
        if path is None:
            raise web.HTTPNotFound(text=f"the model of the run has no file {name!r}")
        return web.FileResponse(path, chunk_size=2**20)

    async def _joined(self, request: web.Request) -> web.Response:
        return web.json_response(self.registry.joined())

    async def _claim(self, request: web.Request) -> web.Response:
        return web.json_response(self.registry.claim())

    async def _view(self, request: web.Request) -> web.Response:
        return web.json_response(asdict(self.registry.view(_number(request))))

    async def _register(self, request: web.Request) -> web.Response:
        try:
            location = Location(**await request.json())
            return web.json_response(asdict(self.registry.register(_number(request), location)))
        except (TypeError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"no location of a generator: {error}") from error
        except LookupError as error:
            raise web.HTTPConflict(text=str(error)) from error

    async def _withdraw(self, request: web.Request) -> web.Response:
        self.registry.withdraw(_number(request))
        return web.json_response({})

    async def _leave(self, request: web.Request) -> web.Response:
        self.registry.ask_to_leave(_number(request))
        return web.json_response({})

    def _model_files(self) -> list[Path]:
        """The files at the top of the model's folder; none of a model that every machine finds by its name."""
        spec = self.registry.spec
        return sorted(path for path in Path(spec.model).iterdir() if path.is_file()) if spec.serves_model else []


def _number(request: web.Request) -> int:
    return int(request.match_info["number"])
