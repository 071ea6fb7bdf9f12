"""The episodes of a run whose agents lrl does not start: each waits until an agent takes it.

    POST /episodes     takes an episode; with the run's key for agents, which can do no more
    POST /KEY/v1/end   ends it, with a reward or an error

From then on it is an episode like all others: a request is an observation, and its answer a turn.
No code of an agent runs here, so none can hang or die; an agent that does is silent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from lrl.checkpoints.run_folder import OwnerOnlyFolder
from lrl.environments.agent import Agent
from lrl.environments.agent_server import AgentConversation, AgentServer, address_of, refusal
from lrl.environments.base import Written
from lrl.environments.play import Play, Reply, finite
from lrl.environments.pool import LOG_EVERY_S, OUTAGE_S
from lrl.errors import EpisodeError, NoEnvironments, WorkerLost
from lrl.system.auth import given_secret, is_allowed
from lrl.system.output import best_effort

if TYPE_CHECKING:
    from lrl.system.endpoint import Endpoint
    from lrl.types import Prompt

log = logging.getLogger(__name__)

KEY_VARIABLE = "LRL_AGENT_KEY"
"""A run that is started with it takes it as its key for agents."""
EPISODES = "/episodes"
FOLDER, FILE = "agents", "address.json"
RETRY_AFTER_S = 1
"""Seconds after which an agent asks again for an episode, if none waits."""
LONGEST_ERROR = 500
"""Characters of an agent's error that are kept."""


class ExternalAgents(AgentServer):
    """The episodes of a run, for agents elsewhere, and the server at which these take them: an
    `EnvironmentPool` without processes. Use it on one event loop, but for `close`.
    `turn_timeout_s` is the longest time between an answer and the agent's next request."""

    def __init__(self, agent: Agent, turn_timeout_s: float) -> None:
        super().__init__()
        self.agent = agent
        self.turn_timeout_s = turn_timeout_s
        self.counts: Counter[str] = Counter()
        """See `EnvironmentPool.counts`."""
        self._key = given_secret(KEY_VARIABLE, "play episodes of the run and give rewards")
        self._serving: asyncio.Task[None] | None = None
        self._files: OwnerOnlyFolder | None = None
        self._waiting: deque[ExternalEpisode] = deque()
        self._heard_at = 0.0
        """When the last sign of an agent came."""

    async def listen(self, endpoint: Endpoint, folder: Path) -> str:
        """Serves until `close`; returns what agents must know. The address and the key are written
        into the run's folder, for this user alone. Raises ConfigError if the port is taken."""
        assert self.agent.port is not None, "the agents are elsewhere"
        listener = endpoint.reserve_port(self.agent.port, "Agent.port")
        self._serving = asyncio.ensure_future(self.serve(listener, endpoint.identity()))
        self.url = endpoint.url(listener.getsockname()[1], endpoint.elsewhere)
        file = folder / FOLDER / FILE
        with best_effort("The address for agents", file):
            self._files = OwnerOnlyFolder(file.parent)
            self._files.make()
            self._files.write(FILE, {"url": self.url, "key": self._key})
        return (
            f"Agents take episodes by POST {self.url}{EPISODES}, from the first step on; their "
            f"key is in {file}."
        )

    def open(self, prompt: Prompt) -> ExternalEpisode:
        return ExternalEpisode(self, prompt)

    async def wait_for_agent(self, episode: ExternalEpisode) -> None:
        """Returns when an agent has taken an episode; raises NoEnvironments if none has taken any
        for `OUTAGE_S`."""
        began = time.monotonic()
        self._waiting.append(episode)
        try:
            while not episode.taken.is_set():
                if episode is self._waiting[0]:  # the one that waits longest
                    self._check_outage(began)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOG_EVERY_S):
                        await episode.taken.wait()
        finally:
            if episode in self._waiting:
                self._waiting.remove(episode)

    def close(self) -> None:
        """Ends the server. May be called twice, and on another thread."""
        serving, self._serving = self._serving, None
        if serving is not None and not (loop := serving.get_loop()).is_closed():
            loop.call_soon_threadsafe(serving.cancel)
        if self._files is not None:
            with best_effort("The end of the run", self._files.path):
                self._files.clear()
                self._files.path.rmdir()
            self._files = None

    def routes(self) -> Sequence[web.RouteDef]:
        own = [web.post(EPISODES, self._take), web.post("/{key}/v1/end", self._end)]
        return [*own, *super().routes()]

    async def _take(self, request: web.Request) -> web.Response:
        if not is_allowed(request.raw_headers, self._key):
            raise refusal(web.HTTPUnauthorized, "the API key is not the run's key for agents")
        self._heard_at = time.monotonic()
        if not self._waiting:
            text = "no episode waits for an agent: as many are played as the run may need now"
            response = refusal(web.HTTPTooManyRequests, f"{text}. Ask again")
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            raise response
        episode = self._waiting.popleft()
        episode.taken.set()
        self.playing[episode.key] = episode
        # By the address at which the agent has reached this server, be it a tunnel's.
        told = episode.row | address_of(f"{request.scheme}://{request.host}", episode.key)
        return web.json_response(told, dumps=partial(json.dumps, default=str))

    async def _end(self, request: web.Request) -> web.Response:
        body = await self.body_of(request)
        episode = self.episode_of(request)
        assert isinstance(episode, ExternalEpisode), "an agent has taken it here"
        try:
            if not isinstance(body, dict) or body.keys() - {"reward", "error"}:
                raise TypeError('give {"reward": 0.5}, {"error": "why"} or {}')
            reward, error = body.get("reward"), body.get("error")
            if error is not None and not (error and isinstance(error, str)):
                raise TypeError("`error` is no text")
            if not error and not episode.answered:
                text = "the policy has not written a turn yet. Ask for one, or give an `error`"
                raise TypeError(text)
            episode.end(0.0 if reward is None else finite(reward), error or "")
        except TypeError as wrong:
            raise refusal(web.HTTPBadRequest, str(wrong)) from wrong
        self.end(episode.key)
        return web.json_response({})

    def _check_outage(self, began: float) -> None:
        """Looks for agents on behalf of an episode that has waited since `began`."""
        if self._serving is not None and self._serving.done():
            self._serving.result()  # an error of the server is one of the run
        if self.playing:
            self._heard_at = time.monotonic()
        silent_s = time.monotonic() - max(self._heard_at, began)
        text = (
            f"No agent has asked for an episode for {silent_s:.0f} s: data.environment is of "
            f"agents that lrl does not start (Agent.port). Start some, for POST {self.url}{EPISODES}"
        )
        if silent_s > OUTAGE_S:
            raise NoEnvironments(f"{text}.")
        if silent_s > LOG_EVERY_S:
            log.warning("%s; %d episodes wait, for %g s.", text, len(self._waiting), OUTAGE_S)


class ExternalEpisode(AgentConversation):
    """An episode that an agent elsewhere plays (`lrl.rollouts.episodes.episode.Conversation`)."""

    def __init__(self, agents: ExternalAgents, prompt: Prompt) -> None:
        self._agents = agents
        self._replies: asyncio.Queue[Reply | EpisodeError] = asyncio.Queue()
        self._play = Play(agents.agent, self._replies.put_nowait)
        super().__init__(self._play, agents.agent.ignore, agents.agent.branches)
        self.row = prompt.columns | {"prompt": prompt.text}
        """What the agent is told."""
        self.taken = asyncio.Event()

    async def begin(self) -> Reply:
        """Waits for an agent and for its first request."""
        await self._agents.wait_for_agent(self)
        try:
            return await self._next_reply()
        except TimeoutError as silent:
            self._agents.counts["restarted"] += 1
            raise WorkerLost(f"an agent took the episode and {silent}") from None

    async def reply(self, turn: Written) -> Reply:
        """Answers the agent's request with a turn, and waits for its next one, or for the end."""
        self._play.wrote(turn)
        try:
            return await self._next_reply()
        except TimeoutError as silent:
            raise EpisodeError("tool_timeout", f"the agent {silent}") from None

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self._agents.end(self.key)

    def end(self, reward: float, error: str) -> None:
        if error:
            text = f"the agent has said: {error[:LONGEST_ERROR]}"
            self._replies.put_nowait(EpisodeError("environment_error", text))
        else:
            self._replies.put_nowait(Reply("", True, reward))

    async def _next_reply(self) -> Reply:
        """Returns what the agent does next; raises TimeoutError if it is silent for too long."""
        limit_s = self._agents.turn_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._replies.get()
        except TimeoutError:
            raise TimeoutError(f"has asked for nothing in {limit_s:g} s") from None
        if isinstance(reply, EpisodeError):
            raise reply
        return reply
