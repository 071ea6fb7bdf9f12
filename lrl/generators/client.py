"""HTTP client of one generator: the route that writes, and vLLM's generate and RL routes. Every
call has a deadline.

The client decides nothing: the dispatch policy chooses the generator, and the fleet handles
failures. Tokens travel as frames, each with the new tokens of several responses to one prompt:

    {"parts": [[number, tokens, finish_reason, versions], ...]}\\n
    token ids, int32, and log-probs, float32, little-endian

Two other frames have no numbers:

    {"error": "..."}\\n      the request failed after it had begun
    {"flushed": N}\\n        all tokens that were written before the flush N have been sent

JSON for every token was most of the work at both ends.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import ssl
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain, repeat
from typing import Any, NamedTuple

import aiohttp

from lrl.errors import GeneratorError, GeneratorTimeout, RequestRejected
from lrl.system.auth import bearer
from lrl.types import Rollout, Sampling

WRITE, FLUSH = "/lrl/write", "/lrl/flush"
"""The routes of a generator (`lrl.vllm_plugin.write_route`)."""
HOLD_S = 1.0
"""Seconds for which a token may wait in the engine (`lrl.vllm_plugin.output_batching`); its
generator's death can cost a response the tokens of as long."""
REQUEST_PREFIX = "lrl-"
"""Part of the ids of lrl's requests, whose tokens are batched; other clients of this server do not
wait."""
BYTES_PER_NUMBER = 8
"""Of a token and its log-prob."""
Span = tuple[str, int, int]
"""Tokens of one version: the version, the first token and the token after the last."""
READ_AHEAD_BYTES = 2**24
"""Bytes that a connection may be ahead of its reader."""
GENERATE = "/inference/v1/generate"
TOP_PRIORITY = -1_000_000
"""Priority before every rollout."""
FINISH_REASONS = ("stop", "length")


class Part(NamedTuple):
    """New tokens of one response."""

    number: int
    """Of the response in its request, from 0."""
    token_ids: list[int]
    logprobs: list[float]
    """In nats, one for each token."""
    finish_reason: str | None
    """None if the response continues."""
    versions: list[Span] | None
    """Of the whole response so far; None if vLLM does not know them."""


def pack(parts: Sequence[Part]) -> bytes:
    """Returns the frame of `parts`; raises RuntimeError if a token has no log-prob."""
    tokens, logprobs = array("i"), array("f")
    for part in parts:
        if len(part.token_ids) != len(part.logprobs):
            raise RuntimeError(
                f"{len(part.token_ids)} tokens came with {len(part.logprobs)} log-probs"
            )
        tokens.extend(part.token_ids)
        logprobs.extend(part.logprobs)
    head = [[part.number, len(part.token_ids), part.finish_reason, part.versions] for part in parts]
    return line({"parts": head}) + tokens.tobytes() + logprobs.tobytes()


def line(head: dict[str, Any]) -> bytes:
    return json.dumps(head).encode() + b"\n"


def size(head: dict[str, Any]) -> int:
    """Returns the bytes that follow a first line."""
    return BYTES_PER_NUMBER * sum(tokens for _, tokens, _, _ in head.get("parts", ()))


def unpack(head: dict[str, Any], numbers: bytes) -> Iterator[Part]:
    """Yields the parts of a frame; `numbers` are its `size(head)` bytes."""
    middle, start = len(numbers) // 2, 0
    tokens = memoryview(numbers)[:middle].cast("i").tolist()
    logprobs: list[float] = array("f", numbers[middle:]).tolist()
    for number, count, reason, versions in head["parts"]:
        new = slice(start, start + count)
        yield Part(number, tokens[new], logprobs[new], finish_reason=reason, versions=versions)
        start += count


class GeneratorClient:
    """The client of one vLLM server, with the run's token; lives on the run's asyncio loop.

    Args:
        url: `http://host:port` or `https://host:port`.
        name: The generator's, in errors.
        token: The run's.
        trust: TLS context that accepts the server's certificate; None for plain HTTP.
    """

    def __init__(
        self, url: str, name: str, token: str, trust: ssl.SSLContext | None = None
    ) -> None:
        self.url = url
        self.name = name
        self.last_token_at = 0.0
        """Time of the last part of a response, on the clock of the loop."""
        # Another run on the same server may have other weights under the same version.
        self._salt = secrets.token_hex(8)
        self._headers = {"Authorization": bearer(token)}
        self._trust = trust
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._flushed: dict[str, int] = {}  # the last flush whose mark came, by request in flight
        self._news = asyncio.Event()  # set and replaced at each mark and each end of a request

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
        leaves: Callable[[], bool] = lambda: False,
    ) -> None:
        """Streams the responses to one prompt with one request; the rollouts grow in place.

        Args:
            prompt_ids: Token ids of the prompt.
            rollouts: Empty rollouts, or a single one that continues after the tokens it has.
            sampling: Sampling parameters.
            version: Returns the generator's present version. It salts the prefix cache, so that no
                new response starts on keys and values of other weights, even if a sync keeps these.
            priority: Lower goes first.
            deadline_s: Seconds for the whole request.
            ended: Called at the end of each response.
            leaves: Called at the mark of each flush; whether the request ends there.

        Raises:
            GeneratorError: The request failed. The rollouts keep the tokens received so far.
        """
        written = rollouts[0].token_ids
        name = secrets.token_hex(8)
        body = {
            "token_ids": prompt_ids + written,
            "sampling_params": sampling.as_vllm(n=len(rollouts), written=len(written)),
            "priority": priority,
            "cache_salt": f"{version()}-{self._salt}",
            "request_id": name,
        }
        responses = ResponseStream(rollouts, version, ended)
        self._flushed[name] = 0
        try:
            async with self._request("POST", WRITE, body, deadline_s) as response:
                while line := await response.content.readline():
                    self.last_token_at = asyncio.get_running_loop().time()
                    head = json.loads(line)
                    if number := head.get("flushed"):
                        self._flushed[name] = number
                        self._tell()
                        if leaves():
                            return
                    else:
                        responses.take(head, await response.content.readexactly(size(head)))
            responses.end()
        except (ValueError, EOFError) as error:
            # A malformed response, or a frame that breaks off.
            raise GeneratorError(f"{self.name}: {WRITE}: {error}.") from error
        finally:
            del self._flushed[name]
            self._tell()

    async def flush(self, deadline_s: float) -> None:
        """Waits until the rollouts have all tokens that the generator has written so far."""
        answer = await self.post(FLUSH, {}, deadline_s=deadline_s)
        number, names = answer["flushed"], answer["requests"]
        try:
            async with asyncio.timeout(deadline_s):
                while any(self._flushed.get(name, number) < number for name in names):
                    await self._news.wait()
        except TimeoutError as error:
            text = f"not all tokens came within {deadline_s:g} s."
            raise GeneratorTimeout(f"{self.name}: {FLUSH}: {text}") from error

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def prompt_logprobs(
        self, token_ids: list[int], *, salt: str, deadline_s: float
    ) -> list[float]:
        """Returns log-probs of `token_ids[1:]` under the present weights (temperature 1). Involves
        every process of the server."""
        body = {
            "token_ids": token_ids,
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0},
            "cache_salt": f"{salt}-{self._salt}",
            "priority": TOP_PRIORITY,
        }
        response = await self.post(GENERATE, body, deadline_s=deadline_s)
        try:
            entries = zip(response["prompt_logprobs"][1:], token_ids[1:], strict=True)
            return [entry[str(token)]["logprob"] for entry, token in entries]
        except (KeyError, TypeError, ValueError) as error:
            text = f"answered without the prompt's log-probs: {str(response)[:300]}"
            raise GeneratorError(f"{self.name}: {GENERATE} {text}") from error

    async def get(self, route: str, *, deadline_s: float) -> Any:
        return await self.post(route, deadline_s=deadline_s, method="GET")

    async def post(
        self,
        route: str,
        body: dict[str, Any] | None = None,
        *,
        deadline_s: float,
        method: str = "POST",
    ) -> Any:
        """Returns the JSON of the response; raises GeneratorError unless it is a 200."""
        async with self._request(method, route, body, deadline_s) as response:
            try:
                return await response.json()
            except ValueError as error:
                raise GeneratorError(f"{self.name}: {route} answered no JSON: {error}") from error

    @asynccontextmanager
    async def _request(
        self, method: str, route: str, body: dict[str, Any] | None, deadline_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Opens the stream of a response; turns every failure into a `GeneratorError`."""
        # By an eviction. aiohttp's own error is a RuntimeError, which a sync did not expect.
        if self._closed:
            raise GeneratorError(f"{self.name}: {route} was not sent: its connections are closed.")
        if self._session is None:
            # No connection limit: the pool limits the requests in flight. A connection for each
            # request: a server once closed an idle one just as a /resume went out on it, and that
            # ended a run; and with a pool of connections the open files of a run crept up to the
            # most requests that were ever in flight at once.
            connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=self._trust or True)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                trust_env=False,
                read_bufsize=READ_AHEAD_BYTES,
            )
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with self._session.request(
                method, f"{self.url}{route}", json=body, timeout=timeout
            ) as response:
                if response.status == 200:
                    yield response
                    return
                status, text = response.status, (await response.text())[:500]
        except TimeoutError as error:
            text = f"{route} did not answer within {deadline_s:g} s."
            raise GeneratorTimeout(f"{self.name}: {text}") from error
        except aiohttp.ClientError as error:
            raise GeneratorError(f"{self.name}: {route} failed: {error!r}") from error
        kind = RequestRejected if 400 <= status < 500 else GeneratorError
        raise kind(f"{self.name}: {route} answered {status}: {text}")

    async def close(self) -> None:
        """Closes the connections for good; idempotent."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)
            self._session = None


class ResponseStream:
    """Appends the frames of one request to a rollout for each of its responses.

    Each frame tells which version wrote which tokens of the response so far
    (`lrl.vllm_plugin.output_batching`). A server that does not know gives its tokens the version
    that it had at the request, which is never too young: the bound on lag holds.
    """

    def __init__(
        self, rollouts: Sequence[Rollout], version: Callable[[], int], ended: Callable[[], None]
    ) -> None:
        self._rollouts = rollouts
        self._version = version
        self._ended = ended
        self._first_version = version()
        self._starts = [len(rollout.token_ids) for rollout in rollouts]

    def take(self, head: dict[str, Any], numbers: bytes) -> None:
        """Appends a frame; raises ValueError for an error, a wrong log-prob, version or
        end."""
        if "parts" not in head:
            raise ValueError(f"the stream carries {str(head)[:300]}")
        for part in unpack(head, numbers):
            self._append(part)
            if (reason := part.finish_reason) is not None:
                if reason not in FINISH_REASONS:
                    raise ValueError(f"a response ended with finish_reason {reason!r}")
                self._rollouts[part.number].finish_reason = reason
                self._ended()

    def end(self) -> None:
        """Ends the stream; raises ValueError if a response has not ended."""
        if unfinished := sum(not rollout.finished for rollout in self._rollouts):
            raise ValueError(
                f"the stream ended before {unfinished} of its {len(self._rollouts)} responses did"
            )

    def _append(self, part: Part) -> None:
        rollout = self._rollouts[part.number]
        if not math.isfinite(sum(part.logprobs)):
            raise ValueError("a log-prob is infinite or no number")
        rollout.token_ids += part.token_ids
        rollout.logprobs += part.logprobs
        rollout.versions += [self._first_version] * len(part.token_ids)
        if part.versions is not None:
            self._set_versions(rollout, self._starts[part.number], part.versions)

    def _set_versions(self, rollout: Rollout, start: int, spans: Sequence[Span]) -> None:
        """Sets the versions of all tokens that the request has written, from `start` on."""
        counts = [(int(version), stop - first) for version, first, stop in spans]
        tokens = len(rollout.token_ids) - start
        if (versions := sum(count for _, count in counts)) != tokens:
            raise ValueError(f"a response of {tokens} tokens came with {versions} versions")
        if any(not self._first_version <= version <= self._version() for version, _ in counts):
            raise ValueError(
                f"a response says that versions {sorted({version for version, _ in counts})} wrote "
                f"it; the generator held {self._first_version} to {self._version()}"
            )
        rollout.versions[start:] = chain.from_iterable(
            repeat(version, count) for version, count in counts
        )
