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
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import psutil

from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.random_policy import made
from benchmarks.runs import lent_server, serve_first_version
from lrl.generators.client import GENERATE, GeneratorClient
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.system.auth import bearer
from lrl.types import Rollout, Sampling

PROMPT_TOKENS = 64
DEADLINE_S = 600.0
WAYS = ("vllm-16", "vllm-64", "vllm-256", "vllm-whole", "lrl")
WARM_UP_TOKENS = 16
PROCESSES = ("api_server", "engine", "client")
SETTINGS: dict[str, Any] = {
    "ways": (list(WAYS), "in turn", WAYS),
    "requests": (16, "at once"),
    "responses": (8, "of a request"),
    "tokens": (512, "of a response"),
    "repeats": (3, "rounds of each way"),
}


class StockClient:
    """Reads vLLM's own generate route, in chunks of so many tokens of a response; None asks for
    whole responses."""

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
        return GeneratorClient(server.url, server.name, server.token, server.location.context())
    chunk = way.removeprefix("vllm-")
    return StockClient(server, None if chunk == "whole" else int(chunk))


def processor_seconds(processes: Sequence[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in processes] + [time.process_time()]


async def microseconds(
    way: str, server: Server, processes: Sequence[psutil.Process], *sizes: int
) -> dict[str, float]:
    """Writes so many requests, responses to each and tokens of each, all at once; returns the
    processor time of a token in each process."""
    requests, responses, tokens = sizes
    client = client_of(way, server)
    sampling = Sampling(n=responses, max_tokens=tokens)
    groups = [[Rollout() for _ in range(responses)] for _ in range(requests)]
    how: dict[str, Any] = {"version": lambda: 0, "priority": 0, "deadline_s": DEADLINE_S}
    before = processor_seconds(processes)
    async with asyncio.timeout(DEADLINE_S):
        prompts = ([1 + number % 500] * PROMPT_TOKENS for number in range(requests))
        works = (
            client.write(prompt, group, sampling, **how)
            for prompt, group in zip(prompts, groups, strict=True)
        )
        await asyncio.gather(*works)
    await client.close()
    after = processor_seconds(processes)
    written = [one for group in groups for one in group]
    assert all(len(one.token_ids) == len(one.logprobs) == tokens for one in written)
    each = (
        1e6 * (end - start) / (len(written) * tokens)
        for start, end in zip(before, after, strict=True)
    )
    return dict(zip(PROCESSES, each, strict=True))


def processes_of(server: Server) -> list[psutil.Process]:
    everything = server.processes()
    said = {one: " ".join([one.name(), *one.cmdline()]) for one in everything}
    (engine,) = [one for one in everything if "EngineCore" in said[one]]
    return [engine.parent() or everything[0], engine]


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    policy = made("tiny", args.folder, "cpu")
    settings = ServerSettings(
        max_model_len=PROMPT_TOKENS + args.tokens,
        max_num_seqs=args.requests * args.responses,
        dtype="float32",
        kv_cache_gib=2.0,
    )
    rows = {row["way"]: row for row in missing}
    with lent_server(policy, settings, args.folder) as server:
        serve_first_version(server)
        processes = processes_of(server)

        def once(way: str, tokens: int = args.tokens) -> dict[str, float]:
            sizes = (args.requests, args.responses, tokens)
            return asyncio.run(microseconds(way, server, processes, *sizes))

        for way in rows:  # warms up
            once(way, WARM_UP_TOKENS)
        found = records.in_turns(rows, args.repeats, once)
    for way, row in rows.items():
        yield row | {f"{process}_us": spread for process, spread in found[way].items()}


def runs(args: argparse.Namespace) -> Iterator[Row]:
    sizes = arguments.chosen(args, "requests", "responses", "tokens", "repeats")
    yield from ({"way": way} | sizes for way in args.ways)


def table(rows: Sequence[Row]) -> str:
    heads = ["way", "API server, µs a token", "spread", "client", "spread", "engine", "spread"]
    lines = []
    for row in rows:
        cells = [row["way"]]
        for name in ("api_server", "client", "engine"):
            least, middle, most = row[f"{name}_us"]
            cells += [f"{middle:.2f}", f"{least:.2f} to {most:.2f}"]
        lines.append([*cells, format(1e6 / row["api_server_us"][1], ",.0f")])
    return records.markdown([*heads, "tokens a second of the API server"], lines)


if __name__ == "__main__":
    arguments.run("token_path", __doc__, SETTINGS, runs, measure, table)
