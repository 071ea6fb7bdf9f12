"""The server of `lrl view`: a page without data, open to all, and the rollouts as JSON, behind a
token.

The browser gets the token in the part of the address behind `#`, which it sends to no server, and the
page sends it with each request for data. So the token is in no log and no `Referer`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, get_type_hints

from aiohttp import web

from lrl.system.auth import TokenServer
from lrl.system.endpoint import Endpoint
from lrl.viewer.rollout_file import RolloutIndex, Wanted

PAGE = Path(__file__).parent / "page"
FILES = {"/": "index.html", "/view.js": "view.js", "/view.css": "view.css"}
MOST_ROWS = 200
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Should any of a response be taken for a script, the browser runs and loads nothing."""


class Viewer:
    """Answers the page's requests about one run.

    Args:
        path: The run's `rollouts.jsonl`.
        name: The run's name, for the page.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.index = RolloutIndex(path)
        self.name = name

    def serve(self, endpoint: Endpoint, token: str, port: int) -> TokenServer:
        """Starts a server; see `TokenServer` for arguments and errors."""
        self.index.refresh()
        routes = [web.get(path, self._file) for path in FILES]
        routes += [
            web.get("/api/run", self._run),
            web.get("/api/groups", self._groups),
            web.get("/api/group", self._group),
        ]
        return TokenServer(endpoint, token, routes, port, open_paths=FILES)

    async def _file(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(PAGE / FILES[request.path], headers=HEADERS)

    async def _run(self, request: web.Request) -> web.Response:
        self._refresh()
        if request.query.get("revision") == str(self.index.revision):
            return _json({"revision": self.index.revision})
        return _json({"name": self.name} | overview(self.index))

    async def _groups(self, request: web.Request) -> web.Response:
        self._refresh()
        asked = dict(request.query)
        try:
            offset = int(asked.pop("offset", 0))
            if offset < 0:
                raise ValueError(f"offset is {offset}")
            order = asked.pop("order", "newest")
            wanted = wanted_by(asked)
            found = self.index.find(wanted, order)
        except (KeyError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"The list cannot be had: {error!r}") from error
        rows = [group.shown for group in found[offset : offset + MOST_ROWS]]
        return _json({"revision": self.index.revision, "total": len(found), "rows": rows})

    async def _group(self, request: web.Request) -> web.Response:
        self._refresh()
        try:
            place = int(request.query["step"]), int(request.query["index"])
        except (KeyError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"No group is asked for: {error!r}") from error
        try:
            found = self.index.read(*place)
        except ValueError as error:
            text = f"A line of it in {self.index.path} is no JSON: {error}."
            raise web.HTTPUnprocessableEntity(text=text) from error
        if found is None:
            raise web.HTTPNotFound(text="The run has no such group; it may have been resumed.")
        return _json(found)

    def _refresh(self) -> None:
        """Reads what the run has written since the last request."""
        try:
            self.index.refresh()
        except OSError as error:
            raise web.HTTPNotFound(
                text=f"{error.filename} cannot be read: {error.strerror}. If the run's folder has "
                "another place now, end lrl view and start it there."
            ) from error


def wanted_by(asked: dict[str, str]) -> Wanted:
    """Returns what the words of a request want; an empty word wants nothing of its kind. Raises
    KeyError or ValueError for others."""
    kinds = get_type_hints(Wanted)
    return Wanted(**{name: kinds[name](word) for name, word in asked.items() if word})


def overview(index: RolloutIndex) -> dict[str, Any]:
    """Returns what the head of the page shows of all groups."""
    rewards: dict[int, list[float]] = defaultdict(list)
    failures, finish_reasons = Counter[str](), Counter[str]()
    responses = 0
    for group in index.groups:
        of_step = rewards[group.shown["step"]]
        for response in group.shown["responses"]:
            responses += 1
            finish_reasons[response["finish_reason"]] += 1
            if response["failure"]:
                failures[response["failure"]] += 1
            if response["reward"] is not None:
                of_step.append(response["reward"])
    every = [reward for of_step in rewards.values() for reward in of_step]
    steps = sorted(rewards)
    return {
        "revision": index.revision,
        "groups": len(index.groups),
        "responses": responses,
        "steps": [[step, fmean(rewards[step]) if rewards[step] else None] for step in steps],
        "least_reward": min(every, default=0.0),
        "most_reward": max(every, default=0.0),
        "failures": failures,
        "finish_reasons": finish_reasons,
    }


def _json(content: dict[str, Any]) -> web.Response:
    return web.json_response(content, headers=HEADERS)
