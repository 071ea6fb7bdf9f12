"""HTTP to one generator: vLLM's token-in/token-out route and its RL routes. Every call has a deadline and names itself.

Nothing here decides anything: which prompt goes where is dispatch's, what a failure means is the fleet's.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from lrl.generators.auth import bearer
from lrl.generators.response_stream import ResponseStream
from lrl.types import Rollout, Sampling

LONGEST_LINE = 2**24
"""Bytes. While nobody reads a stream vLLM joins its chunks, so a line can hold a whole long response."""
GENERATE = "/inference/v1/generate"
DATA, DONE = b"data: ", b"data: [DONE]"
FIRST = -1_000_000
"""Priority before every rollout."""


class GeneratorError(RuntimeError):
    """A generator did not do what it was asked; the message names the generator, the route and what it said."""


class Refused(GeneratorError):
    """A generator answered that the request itself is wrong (HTTP 4xx): another generator would say the same."""


class TooLate(GeneratorError):
    """A generator had not answered when the deadline of the request came."""


class GeneratorClient:
    """The client of one vLLM server; lives on the run's asyncio loop.

    Args:
        url: Address of the server, `http://host:port` or `https://host:port`.
        name: What errors call it.
        token: The run's, which the server asks for.
        trust: How the server is known; None for plain HTTP.
    """

    def __init__(self, url: str, name: str, token: str, trust: ssl.SSLContext | None = None) -> None:
        self.url = url
        self.name = name
        self.heard_at = 0.0
        """When the server last sent a part of a response, on the clock of the loop."""
        self._salt = secrets.token_hex(8)
        self._headers = {"Authorization": bearer(token)}
        self._trust = trust
        self._session: aiohttp.ClientSession | None = None

    async def write(
        self,
        prompt_ids: list[int],
        rollouts: Sequence[Rollout],
        sampling: Sampling,
        *,
        version: Callable[[], int],
        priority: int,
        deadline_s: float,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Have responses to one prompt written to their end by one request; they grow in place while it streams.

        Args:
            prompt_ids: The prompt.
            rollouts: The responses: fresh ones, or a single one, which goes on behind the tokens that it has.
            sampling: How to draw.
            version: The version the generator holds now. It salts the prefix cache, so that no new response starts on
                keys and values of other weights, also where a sync leaves these (`Generator.pause`).
            priority: Lower goes first.
            deadline_s: Seconds for the whole request.
            ended: Told of each response's end.

        Raises:
            GeneratorError: Whatever went wrong. The rollouts keep what has come.
        """
        written = rollouts[0].token_ids
        parameters = sampling.as_vllm(n=len(rollouts), written=len(written))
        body = {"token_ids": prompt_ids + written, "sampling_params": parameters, "priority": priority}
        body |= {"cache_salt": self._salted(version()), "stream": True}
        responses = ResponseStream(rollouts, version, ended)
        try:
            async with self._asking("POST", GENERATE, body, deadline_s) as response:
                async for line in response.content:
                    self.heard_at = asyncio.get_running_loop().time()
                    if line.startswith(DATA) and not line.startswith(DONE):
                        responses.take(json.loads(line[len(DATA) :]))
            responses.end()
        except ValueError as error:  # MalformedResponse, or no JSON
            raise GeneratorError(f"{self.name}: {GENERATE}: {error}.") from error

    async def prompt_logprobs(self, token_ids: list[int], *, salt: str, deadline_s: float) -> list[float]:
        """Log-probs of `token_ids[1:]`, each given the tokens before it, under the weights held now (temperature 1)."""
        body = {
            "token_ids": token_ids,
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0},
            "cache_salt": self._salted(salt),
            "priority": FIRST,
        }
        response = await self.post(GENERATE, body, deadline_s=deadline_s)
        try:
            entries = response["prompt_logprobs"][1:]
            return [entry[str(token)]["logprob"] for entry, token in zip(entries, token_ids[1:], strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            said = str(response)[:300]
            raise GeneratorError(f"{self.name}: {GENERATE} answered without the prompt's log-probs: {said}") from error

    def _salted(self, what: object) -> str:
        """A salt of this client's own: for another one on the same server the same version may be other weights."""
        return f"{what}-{self._salt}"

    async def heartbeat(self, deadline_s: float) -> None:
        """Have one token written: the whole chain of processes behind the route has to be alive for it."""
        parameters = {"max_tokens": 1, "temperature": 0.0}
        body = {"token_ids": [0], "sampling_params": parameters, "priority": FIRST, "cache_salt": "heartbeat"}
        await self.post(GENERATE, body, deadline_s=deadline_s)

    async def post(self, route: str, body: dict[str, Any] | None = None, *, deadline_s: float) -> Any:
        """POST `body` as JSON and return the response's JSON; anything but 200 with JSON is a `GeneratorError`."""
        async with self._asking("POST", route, body, deadline_s) as response:
            return await self._json(route, response)

    async def get(self, route: str, *, deadline_s: float) -> Any:
        """GET an response's JSON; see `post`."""
        async with self._asking("GET", route, None, deadline_s) as response:
            return await self._json(route, response)

    async def _json(self, route: str, response: aiohttp.ClientResponse) -> Any:
        try:
            return await response.json()
        except ValueError as error:
            raise GeneratorError(f"{self.name}: {route} answered no JSON: {error}") from error

    @asynccontextmanager
    async def _asking(
        self, method: str, route: str, body: dict[str, Any] | None, deadline_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to a request while it comes; every way to fail is a `GeneratorError`."""
        limit = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with self._http().request(method, f"{self.url}{route}", json=body, timeout=limit) as response:
                if response.status == 200:
                    yield response
                    return
                status, said = response.status, (await response.text())[:500]
        except TimeoutError as error:
            raise TooLate(f"{self.name}: {route} did not answer within {deadline_s:g} s.") from error
        except aiohttp.ClientError as error:
            raise GeneratorError(f"{self.name}: {route} failed: {error!r}") from error
        kind = Refused if 400 <= status < 500 else GeneratorError
        raise kind(f"{self.name}: {route} answered {status}: {said}")

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)
            self._session = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit of our own: how many requests are in flight is the pool's to say. A connection for each: a server
            # once closed an idle one just as a /resume went out on it, and that ended a run; and with a pool of them
            # the open files of a run crept up to the most requests that were ever in flight at once.
            connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=self._trust or True)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, trust_env=False, read_bufsize=LONGEST_LINE
            )
        return self._session
