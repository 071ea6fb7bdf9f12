"""HTTP to one generator: vLLM's token-in/token-out route and its RL routes. Every call has a deadline and names itself.

Nothing here decides anything: which prompt goes where is dispatch's, what a failure means is the fleet's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from lrl.data import Rollout
from lrl.generators.guard import bearer
from lrl.generators.sampling import Sampling

IDLE_CONNECTION_S = 60.0
"""We let go of an idle connection first: the server is told to wait ten times as long. Its own 5 s once closed one just
as a /resume went out on it, and that ended a run."""


class GeneratorError(RuntimeError):
    """A generator did not do what it was asked; the message names the generator, the route and what it said."""


class GeneratorClient:
    """The client of one vLLM server; lives on the run's asyncio loop.

    Args:
        url: Address of the server, `http://host:port`.
        name: What errors call it.
        token: The run's, which the server asks for.
    """

    def __init__(self, url: str, name: str, token: str) -> None:
        self.url = url
        self.name = name
        self._headers = {"Authorization": bearer(token)}
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, token_ids: list[int], sampling: Sampling, *, version: int, priority: int, deadline_s: float
    ) -> list[Rollout]:
        """Answer one prompt `sampling.n` times in one request.

        Args:
            token_ids: The prompt.
            sampling: How to draw.
            version: The version the generator holds now; salts the prefix cache, so that no new answer starts on keys
                and values of other weights.
            priority: Lower goes first.
            deadline_s: Seconds for the whole request.

        Returns:
            The answers, without text or reward.
        """
        body = {
            "token_ids": token_ids,
            "sampling_params": sampling.as_vllm(),
            "cache_salt": str(version),
            "priority": priority,
        }
        answer = await self.post("/inference/v1/generate", body, deadline_s=deadline_s)
        return [_rollout(choice, self.name) for choice in answer["choices"]]

    async def prompt_logprobs(self, token_ids: list[int], *, salt: str, deadline_s: float) -> list[float]:
        """Log-probs of `token_ids[1:]`, each given the tokens before it, under the weights held now (temperature 1)."""
        body = {
            "token_ids": token_ids,
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0},
            "cache_salt": salt,
            "priority": -1_000_000,
        }
        answer = await self.post("/inference/v1/generate", body, deadline_s=deadline_s)
        entries = answer["prompt_logprobs"][1:]
        return [entry[str(token)]["logprob"] for entry, token in zip(entries, token_ids[1:], strict=True)]

    async def healthy(self, deadline_s: float) -> bool:
        """Whether /health answers 200 in time; a server that is down or late is simply not healthy."""
        try:
            async with self._http().get(f"{self.url}/health", timeout=_limit(deadline_s)) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False

    async def post(self, route: str, body: dict[str, Any] | None = None, *, deadline_s: float) -> Any:
        """POST `body` as JSON and return the answer's JSON; anything but 200 is a `GeneratorError`."""
        try:
            async with self._http().post(f"{self.url}{route}", json=body, timeout=_limit(deadline_s)) as response:
                if response.status == 200:
                    return await response.json()
                said = (await response.text())[:500]
        except TimeoutError as error:
            raise GeneratorError(f"{self.name}: {route} did not answer within {deadline_s:g} s.") from error
        except aiohttp.ClientError as error:
            raise GeneratorError(f"{self.name}: {route} failed: {error!r}") from error
        raise GeneratorError(f"{self.name}: {route} answered {response.status}: {said}")

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)
            self._session = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit of our own: how many requests are in flight is the crew's to say.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=False)
        return self._session


def _limit(deadline_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=deadline_s)


def _rollout(choice: dict[str, Any], name: str) -> Rollout:
    token_ids = choice["token_ids"]
    versions = [int(span["version"]) for span in choice["weight_versions"] for _ in range(span["start"], span["end"])]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    if not len(token_ids) == len(versions) == len(logprobs):
        raise GeneratorError(
            f"{name}: an answer of {len(token_ids)} tokens came with {len(logprobs)} log-probs and {len(versions)} "
            "versions."
        )
    return Rollout(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=choice["finish_reason"],
        text="",
    )
