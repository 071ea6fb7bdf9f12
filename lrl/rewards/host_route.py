"""The route of rank 0 at which reward hosts join: a websocket for each, opened by the host."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from aiohttp import WSMsgType, web

from lrl.rewards.hosts import Host, Hosts
from lrl.rewards.messages import LONGEST_REPORT, ROUTE, BadReportError

_LONGEST_NAME = 64


def route_of(hosts: Hosts) -> web.RouteDef:
    """Returns the route."""

    async def join(request: web.Request) -> web.StreamResponse:
        number, node = request.query.get("number", ""), request.query.get("node", "")
        if not (node.isprintable() and 0 < len(node) <= _LONGEST_NAME) or (number and not number.isdecimal()):
            raise web.HTTPBadRequest(text="a reward host gives the name of its machine, and its number if it has one")
        socket = web.WebSocketResponse(heartbeat=hosts.heartbeat_s, max_msg_size=LONGEST_REPORT)
        await socket.prepare(request)
        given = int(number) if number else None
        host, first = hosts.connect(given, request.query.get("run", ""), node, _SocketLink(socket))
        try:
            await socket.send_str(first)
            why = await _listen(hosts, host, socket)
        except (BadReportError, ConnectionError) as error:
            why = str(error)
        except asyncio.CancelledError:
            hosts.lose(host, "the server of rank 0 has ended")
            raise
        hosts.lose(host, why)
        await socket.close()
        return socket

    return web.get(ROUTE, join)


async def _listen(hosts: Hosts, host: Host, socket: web.WebSocketResponse) -> str:
    """Takes the reports of a host until its connection ends; returns why it has."""
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            return f"its connection is lost: {message.data!r}"
        try:
            report = json.loads(message.data)
        except ValueError as error:
            raise BadReportError(f"no JSON: {error}") from error
        hosts.hear(host, report)
    cause = socket.exception()
    return "its connection is closed" if cause is None else f"its connection is lost: {cause!r}"


class _SocketLink:
    """See `lrl.rewards.hosts.Link`; the socket lives on the loop on which this is made."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket, self._loop = socket, asyncio.get_running_loop()

    def send(self, message: bytes) -> None:
        self._submit(self._socket.send_bytes(message))

    def end(self) -> None:
        self._submit(self._socket.send_str(json.dumps({"end": True})))

    def cut(self) -> None:
        self._submit(self._socket.close())

    def _submit(self, work: Coroutine[Any, Any, Any]) -> None:
        # Its error needs no reader: a message that cannot be sent belongs to a connection that `_listen` sees ending.
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop has ended, and with it all connections
            work.close()
