"""The server of a run for agents that lrl does not start: they take episodes, and say how these ended.

    POST /episodes                   takes an episode; with the run's key for agents
    POST /KEY/v1/chat/completions    a turn of the policy, as in `agent_server`
    GET  /KEY/v1/models              one model, "policy"
    POST /KEY/v1/end                 ends the episode, with a reward or an error

It listens where the generators do (`strategy.server.host`), in TLS under their certificate. The
run's key takes episodes and no more; an episode has a key of its own.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from lrl.environments.agent_conversation import AgentConversation
from lrl.environments.agent_server import CHAT, AgentServer, error_response, has_key
from lrl.environments.play import finite
from lrl.system.token_server import log as request_log

EPISODES = "/episodes"
END = "/v1/end"
RETRY_AFTER_S = 1
"""Seconds after which an agent asks again for an episode, if none waits."""
LONGEST_ERROR = 500
"""Characters of an agent's error that are kept."""


class ExternalPlay(Protocol):
    """An episode for an agent."""

    conversation: AgentConversation

    def begin_with(self, key: str) -> dict[str, Any]:
        """Notes that an agent plays it with this key; returns the row for the agent."""

    def end_with(self, reward: float) -> None:
        """Notes its end."""

    def fail_with(self, error: str) -> None:
        """Notes that the agent cannot play it to its end."""


class ExternalServer(AgentServer):
    """The server. Use: `serve(listener, tls)`, as a task of the loop on which episodes are played.

    Args:
        key: The run's key for agents.
        next_episode: Returns an episode that waits for an agent; None if there is none.
    """

    serves = f"POST {EPISODES}, POST /KEY{CHAT}, POST /KEY{END}"

    def __init__(self, key: str, next_episode: Callable[[], ExternalPlay | None]) -> None:
        super().__init__()
        self.playing: dict[str, ExternalPlay] = {}
        """Episodes that agents play, by their keys."""
        self._key = key
        self._next_episode = next_episode

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serves until it is cancelled."""
        runner = web.AppRunner(
            self._app(), logger=request_log, access_log=None, shutdown_timeout=1.0
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listener, ssl_context=tls).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    def end(self, key: str, why: str = "") -> None:
        self.playing.pop(key, None)
        super().end(key, why)

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post(EPISODES, self._take),
            web.post("/{key}" + END, self._end),
            *super()._routes(),
        ]

    async def _take(self, request: web.Request) -> web.Response:
        if not has_key(request, self._key):
            return error_response(401, "the API key is not the run's key for agents")
        episode = self._next_episode()
        if episode is None:
            text = "no episode waits for an agent: as many are played as the run may need now"
            response = error_response(429, f"{text}. Ask again")
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            return response
        key = self.begin(episode.conversation)
        self.playing[key] = episode
        # By the address at which the agent has reached this server, be it a tunnel's.
        address = {"base_url": f"{request.scheme}://{request.host}/{key}/v1", "api_key": key}
        row = episode.begin_with(key)
        return web.json_response(row | address, dumps=partial(json.dumps, default=str))

    async def _end(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal_of(request)) is not None:
            return error_response(*refusal)
        body = await request.read()
        key = request.match_info["key"]
        if (episode := self.playing.get(key)) is None:  # it has ended while the body was read
            return error_response(410, self.ended(key))
        try:
            reward, error = _end_in(body)
        except (TypeError, ValueError, RecursionError) as wrong:
            return error_response(400, str(wrong))
        if error:
            episode.fail_with(error[:LONGEST_ERROR])
        elif episode.conversation.turns:
            episode.end_with(reward)
        else:
            text = "the policy has not written a turn yet. Ask for one, or give an `error`"
            return error_response(400, text)
        self.end(key)
        return web.json_response({})


def _end_in(sent: bytes) -> tuple[float, str]:
    """Returns reward and error in the body of a request; raises TypeError, ValueError or
    RecursionError for others."""
    body = json.loads(sent or b"{}")
    if not isinstance(body, dict) or body.keys() - {"reward", "error"}:
        raise ValueError('give {"reward": 0.5}, {"error": "why"} or {}')
    reward, error = body.get("reward"), body.get("error")
    if error is not None and not (error and isinstance(error, str)):
        raise TypeError("`error` is no text")
    return 0.0 if reward is None else finite(reward), error or ""
