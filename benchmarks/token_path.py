"""The path of a token: processor time in vLLM's API server, in its engine and in the client, by the
size of chunks.

    python -m benchmarks.token_path
    python -m benchmarks.token_path --ways vllm-16 lrl --tokens 256 --repeats 1     a rehearsal

One real vLLM server on the CPU with a tiny policy writes `--requests` requests of `--responses`
responses at once, each of `--tokens` tokens. The ways take turns on the same server:

- vllm-N: vLLM's own generate route, streamed in chunks of N tokens of a response, read as JSON line
  by line;
- vllm-whole: the same route without streaming;
- lrl: as a run does it (`lrl.generators.client`).

The time is each process's own processor time, user and system, so other work on the machine matters
little. The engine's includes the policy itself, which is the same in all ways.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks import arguments, records
from benchmarks.random_policy import llama, made_up_rows, make_policy
from lrl.generators.client import GENERATE, GeneratorClient
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.system.auth import bearer
from lrl.types import Rollout, Sampling

PROMPT_TOKENS = 64
DEADLINE_S = 600.0
WAYS = ("vllm-16", "vllm-64", "vllm-256", "vllm-whole", "lrl")
PROCESSES = ("api_server", "engine", "client")


class StockClient:
    """Reads vLLM's own generate route.

    Args:
        server: The server.
        chunk: Tokens of a response in a chunk; None asks for whole responses.
    """

    def __init__(self, server: Server, chunk: int | None) -> None:
        self.url = server.url + GENERATE
        self.headers = {"Authorization": bearer(server.token)}
        self.chunk = chunk
        self.session = aiohttp.ClientSession(headers=self.headers, read_bufsize=2**24)

    async def write(
        self, prompt_ids: list[int], rollouts: Sequence[Rollout], sampling: Sampling, **how: Any
    ) -> None:
        parameters = sampling.as_vllm(len(rollouts), 0) | {"stream_interval": self.chunk}
        body = {
            "token_ids": prompt_ids,
            "sampling_params": parameters,
            "stream": self.chunk is not None,
        }
        async with self.session.post(
            self.url, json=body | {"cache_salt": secrets.token_hex(8)}
        ) as response:
            response.raise_for_status()
            if self.chunk is None:
                return take(rollouts, await response.json())
            async for line in response.content:
                if line.startswith(b"data: {"):
                    take(rollouts, json.loads(line[6:]))

    async def close(self) -> None:
        await self.session.close()


def take(rollouts: Sequence[Rollout], part: dict[str, Any]) -> None:
    for choice in part["choices"]:
        rollout = rollouts[choice["index"]]
        rollout.token_ids += choice["token_ids"]
        rollout.logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]


def client_of(way: str, server: Server) -> StockClient | GeneratorClient:
    if way == "lrl":
        return GeneratorClient(server.url, server.name, server.token, server.trust)
    chunk = way.removeprefix("vllm-")
    return StockClient(server, None if chunk == "whole" else int(chunk))


def processor_seconds(processes: Sequence[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in processes] + [time.process_time()]


async def write_all(client: Any, requests: int, responses: int, tokens: int) -> None:
    sampling = Sampling(n=responses, max_tokens=tokens)
    groups = [[Rollout() for _ in range(responses)] for _ in range(requests)]
    how: dict[str, Any] = {"version": lambda: 0, "priority": 0, "deadline_s": DEADLINE_S}
    async with asyncio.timeout(DEADLINE_S):
        prompts = [[1 + number % 500] * PROMPT_TOKENS for number in range(requests)]
        works: list[Awaitable[None]] = [
            client.write(prompt, group, sampling, **how)
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        await asyncio.gather(*works)
    await client.close()
    assert all(
        len(one.token_ids) == len(one.logprobs) == tokens for group in groups for one in group
    )


def measure(
    make: Callable[[], Any], processes: Sequence[psutil.Process], *sizes: int
) -> list[float]:
    async def round_of() -> list[float]:
        client, before = make(), processor_seconds(processes)
        await write_all(client, *sizes)
        after = processor_seconds(processes)
        return [
            1e6 * (end - start) / math.prod(sizes) for start, end in zip(before, after, strict=True)
        ]

    return asyncio.run(round_of())


async def set_version(server: Server) -> None:
    client = GeneratorClient(server.url, server.name, server.token, server.trust)
    await client.post("/update_weight_version", {"new_version": "0"}, deadline_s=DEADLINE_S)
    await client.close()


def processes_of(server: Server) -> list[psutil.Process]:
    everything = server.processes()
    (engine,) = [
        one
        for one in everything
        if "EngineCore" in one.name() or "EngineCore" in " ".join(one.cmdline())
    ]
    return [engine.parent() or everything[0], engine]


def rounds(server: Server, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Returns the figures of every round of each way, the ways in turn; a short round before warms
    up."""
    processes = processes_of(server)
    figures = {way: list[list[float]]() for way in args.ways}
    asyncio.run(set_version(server))
    for repeat in range(-1, args.repeats):
        for way in args.ways:
            tokens = args.tokens if repeat >= 0 else 16
            found = measure(
                partial(client_of, way, server), processes, args.requests, args.responses, tokens
            )
            if repeat >= 0:
                figures[way].append(found)
    return figures


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ["way", "API server, µs a token", "spread", "client", "spread", "engine", "spread"]
    lines = []
    for row in rows:
        cells = [row["way"]]
        for name in ("api_server", "client", "engine"):
            least, middle, most = row[f"{name}_us"]
            cells += [f"{middle:.2f}", f"{least:.2f} to {most:.2f}"]
        lines.append([*cells, format(1e6 / row["api_server_us"][1], ",.0f")])
    return records.markdown([*heads, "tokens a second of the API server"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.make_parser("token_path", __doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="(all)")
    parser.add_argument("--requests", type=int, default=16, help="at once (%(default)s)")
    parser.add_argument("--responses", type=int, default=8, help="of a request (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a response (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each way (%(default)s)")
    arguments.add_out(parser, "token_path")
    args = arguments.parse(parser, argv)
    with tempfile.TemporaryDirectory() as name:
        policy = Path(name, "policy")
        make_policy(llama("tiny"), [row["question"] for row in made_up_rows()], policy, "cpu")
        settings = ServerSettings(
            max_model_len=PROMPT_TOKENS + args.tokens,
            max_num_seqs=args.requests * args.responses,
            dtype="float32",
            kv_cache_gib=2.0,
        )
        run_id = secrets.token_hex(4)
        server = Server(str(policy), settings, "shared_memory", [], Path(name), 0, run_id)
        server.start()
        try:
            server.wait_ready()
            figures = rounds(server, args)
        finally:
            server.stop()
    names = ("requests", "responses", "tokens", "repeats")
    sizes = {name: getattr(args, name) for name in names}
    rows = []
    for way, values in figures.items():
        columns = zip(PROCESSES, zip(*values, strict=True), strict=True)
        times = {f"{process}_us": records.spread(column) for process, column in columns}
        rows.append({"way": way} | sizes | times | {"command": args.command})
        records.append(args.out, rows[-1])
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
