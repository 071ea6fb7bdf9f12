"""The routes by which a generator writes: an ASGI middleware, which vLLM gets by its class path,
guarded by the run's token.

    POST /lrl/write    streams the responses to one prompt as frames (`lrl.generators.client`)
    POST /lrl/flush    sends all tokens written so far, and marks that place in every stream

vLLM's own generate route would build objects and JSON for each token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lrl.generators.client import FLUSH, REQUEST_PREFIX, WRITE, Part, line, pack

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

T = TypeVar("T")
LOOP_TURNS = 64
"""Turns of the loop in which vLLM hands a message of the engine to all of its responses: 128 of
them in a turn."""


class WriteRoute:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._streams: dict[str, Send] = {}  # that have begun, by the request's id
        # The last requests; what they sent may still be on its way.
        self._ended = deque[str](maxlen=1024)
        self._flushes = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
        if path not in (WRITE, FLUSH):
            return await self.app(scope, receive, send)
        engine = scope["app"].state.engine_client
        body = await Request(scope, receive).body()
        if path == FLUSH:
            return await JSONResponse(await self._flush(engine))(scope, receive, send)
        refusal = await until_gone(self._write(engine, json.loads(body), send), receive)
        if refusal is not None:
            await refusal(scope, receive, send)

    async def _write(self, engine: Any, body: dict[str, Any], send: Send) -> Response | None:
        """Streams the responses; returns the refusal of a request that has not begun."""
        from vllm.exceptions import VLLMClientError

        name = body["request_id"]
        failure, status = b"", 0
        try:
            async with aclosing(generate(engine, body)) as outputs:
                async for output in outputs:
                    if name not in self._streams:
                        await send({"type": "http.response.start", "status": 200, "headers": []})
                        self._streams[name] = send
                    await send(piece(pack([part_of(one) for one in output.outputs])))
        except (VLLMClientError, ValueError) as error:
            failure, status = line({"error": str(error)}), 400
        except Exception as error:
            failure, status = line({"error": f"{type(error).__name__}: {error}"}), 500
        finally:
            if begun := self._streams.pop(name, None) is not None:
                self._ended.append(name)
        if begun:
            await send(piece(failure, more=False))
        return None if begun or not failure else Response(failure, status)

    async def _flush(self, engine: Any) -> dict[str, Any]:
        # The engine sends what it holds before it answers any call.
        await engine.get_weight_version()
        while not engine.engine_core.outputs_queue.empty():
            await asyncio.sleep(0)
        for _ in range(LOOP_TURNS):
            await asyncio.sleep(0)
        number, streams = next(self._flushes), dict(self._streams)
        for name, send in streams.items():
            if name in self._streams:
                await send(piece(line({"flushed": number})))
        return {"flushed": number, "requests": [*streams, *self._ended]}


def generate(engine: Any, body: dict[str, Any]) -> Any:
    """Returns vLLM's outputs, new tokens alone; raises VLLMClientError for a wrong request."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = SamplingParams(
        **body["sampling_params"], output_kind=RequestOutputKind.DELTA, flat_logprobs=True
    )
    prompt = tokens_input(body["token_ids"], cache_salt=body["cache_salt"])
    return engine.generate(
        prompt, sampling, REQUEST_PREFIX + body["request_id"], priority=body["priority"]
    )


def part_of(output: Any) -> Part:
    tokens = list(output.token_ids)
    spans = output.weight_versions
    # With `logprobs=0` there is one number a token.
    logprobs = output.logprobs.logprobs if tokens else []
    versions = None if spans is None else [(span.version, span.start, span.end) for span in spans]
    return Part(
        output.index,
        tokens,
        logprobs=logprobs,
        finish_reason=output.finish_reason,
        versions=versions,
    )


def piece(content: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def until_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """Returns the result of `work`, or None when the client is gone; vLLM then ends its
    responses."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, waiting = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([doing, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        doing.cancel()
        waiting.cancel()
    with suppress(asyncio.CancelledError):
        return await doing
    return None
