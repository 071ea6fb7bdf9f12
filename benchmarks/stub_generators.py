"""Stand-ins for generators: servers with a generator's routes that write made-up tokens at a given
speed, over HTTP.

    python -m benchmarks.stub_generators --servers 16 --rate 40     prints an address for each, and ends with its input

They send what a generator sends: a frame of `lrl.generators.frames` each `HOLD_S` seconds for each
request, with the tokens that its unfinished responses have written since. Every other route answers
{}: it takes its request and no time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from lrl.generators.frames import HOLD_S, WRITE, Part, pack
from lrl.planning.simulator.length_sampling import LengthSampler, Lognormal

MEDIAN = 400
SIGMA = 0.8
LONGEST = 4000
"""Of the lognormal lengths, in tokens: one in a hundred responses is six times as long as the
median."""
TOKENS = list(range(LONGEST))
LOGPROBS = array("f", [-0.5] * LONGEST).tolist()


def lengths() -> LengthSampler:
    """Returns the lengths of the responses to a prompt, which its first token numbers."""
    return Lognormal(MEDIAN, SIGMA, LONGEST)


class StubGenerator:
    """One of them.

    Args:
        rate: Tokens a second of each response.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.lengths = lengths()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answers any request."""
        body = await request.json() if request.can_read_body else {}
        return await self._write(request, body) if request.path == WRITE else web.json_response({})

    async def _write(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        number = body["token_ids"][0]
        left = dict(enumerate(self.lengths.of(number, number, body["sampling_params"]["n"])))
        stream = web.StreamResponse()
        written = 0
        started = asyncio.get_running_loop().time()
        await stream.prepare(request)
        while left:
            await asyncio.sleep(HOLD_S)
            until = int((asyncio.get_running_loop().time() - started) * self.rate)
            parts = []
            for index, length in list(left.items()):
                new, ends = min(length, until) - written, length <= until
                spans = [("0", 0, length)] if ends else None
                parts.append(
                    Part(index, TOKENS[:new], LOGPROBS[:new], "stop" if ends else None, spans)
                )
                if ends:
                    del left[index]
            written = until
            await stream.write(pack(parts))
        await stream.write_eof()
        return stream


async def serve(servers: int, rate: float) -> None:
    """Serves until the end of the input."""
    for _ in range(servers):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", StubGenerator(rate).answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None, "it serves"
        print(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", flush=True)  # type: ignore[attr-defined]
    await asyncio.to_thread(sys.stdin.read)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stub_generators", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--servers", type=int, required=True)
    parser.add_argument(
        "--rate", type=float, required=True, help="tokens a second of each response"
    )
    args = parser.parse_args(argv)
    asyncio.run(serve(args.servers, args.rate))


if __name__ == "__main__":
    main()
