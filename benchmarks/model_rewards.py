"""Responses scored a second by `lrl.rewards.Judge` and `RewardModel`, beside a plain function.

    python -m benchmarks.model_rewards
    python -m benchmarks.model_rewards --seconds 1 --repeats 1     a rehearsal

The endpoint is a process of this machine that answers after a given time, so what is measured is
lrl's own work and its waiting; the last row is a tiny reward model on a real vLLM server. All go
through the pool and its worker processes, with groups in flight as in a run whose generators write
faster than the rewards score. The ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks import arguments, records
from lrl.rewards import ExactMatch, Judge, Reward, RewardModel, RewardModelServer, RewardPool

RESPONSES = 8
"""Of a group."""
RESPONSE = "We look at both sides, collect the terms, and divide. The answer is 4."
VERDICT = '{"reason": "A good one.", "score": 7}'
ANSWERS = {"choices": [{"message": {"content": VERDICT}, "finish_reason": "stop"}]}
SCORES = {"data": [{"index": 0, "probs": [0.5], "num_classes": 1}]}
HEAD = (
    "| reward | answers after | workers | responses a second | of the plain function "
    "| of what waiting allows |\n|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Case:
    """One row: a reward of `kind` whose endpoint answers after `latency_ms`, in `workers`."""

    kind: str
    workers: int
    latency_ms: int = 0

    @property
    def most(self) -> float:
        """Responses a second, if nothing but the endpoint took time."""
        if not self.latency_ms:
            return float("inf")
        return 1000 * RESPONSES * self.workers / self.latency_ms


CASES = (
    Case("plain function", 2),
    *(
        Case(kind, workers, latency_ms)
        for kind in ("Judge", "RewardModel")
        for workers, latency_ms in ((2, 0), (2, 200), (8, 200))
    ),
    Case("RewardModel, tiny, vLLM", 2),
)


def endpoint(tells: Connection) -> None:
    """Answers `/MILLISECONDS/v1/chat/completions` and `/MILLISECONDS/classify` so late; tells its
    address."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(int(request.match_info["late"]) / 1000)
        return web.json_response(SCORES if request.path.endswith("classify") else ANSWERS)

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/{late}/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        tells.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextlib.contextmanager
def answering() -> Iterator[str]:
    """Runs the endpoint; yields its address."""
    spawn = multiprocessing.get_context("spawn")
    told, tells = spawn.Pipe(duplex=False)
    process = spawn.Process(target=endpoint, args=(tells,), daemon=True)
    process.start()
    try:
        yield told.recv()
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[RewardModel]:
    """Runs vLLM with a tiny reward model; yields the reward."""
    # Here: each worker of a pool imports this module, and should start in a fraction of a second.
    import torch
    from transformers import LlamaForSequenceClassification

    from benchmarks.random_policy import llama, make_tokenizer
    from lrl.members.reward_models import RewardModels

    torch.manual_seed(0)
    config = llama("tiny")
    config.num_labels = 1
    LlamaForSequenceClassification(config).float().save_pretrained(folder / "model")
    make_tokenizer([RESPONSE], 512).save_pretrained(folder / "model")
    settings = RewardModelServer(dtype="float32", max_tokens=1024, kv_cache_gib=0.1)
    reward = RewardModel(model=str(folder / "model"), reads="text", server=settings)
    models = RewardModels(folder, lambda: None)
    try:
        models.serve([reward])
        yield reward
    finally:
        models.close()


def reward_of(case: Case, url: str, of_vllm: RewardModel) -> Reward:
    """Returns the reward of a case, whose endpoint is at `url`."""
    if case.kind == "plain function":
        return ExactMatch("answer")
    if case.kind == "Judge":
        template = "Score the response from 0 to 10.\n{prompt}\n{response}"
        return Judge(f"{url}/{case.latency_ms}/v1", "judge", template, highest=10.0)
    if case.kind == "RewardModel":
        return RewardModel(url=f"{url}/{case.latency_ms}", reads="text")
    return of_vllm


def speed(reward: Reward, case: Case, args: argparse.Namespace) -> float:
    """Returns the responses that a pool scores a second."""
    pool = RewardPool([reward], case.workers, timeout_s=150.0)
    pool.start()
    try:
        asyncio.run(scored(pool, time.monotonic() + 1.0, args.at_once))  # warms up
        began = time.monotonic()
        count = asyncio.run(scored(pool, began + args.seconds, args.at_once))
        return count / (time.monotonic() - began)
    finally:
        pool.close()


async def scored(pool: RewardPool, until: float, at_once: int) -> int:
    """Keeps groups in flight until that time; returns the responses that were scored."""
    from lrl.types import Prompt, Rollout  # here: it imports torch, as above

    prompt = Prompt(id=0, token_ids=[1], text="2 + 2?", columns={"answer": RESPONSE})
    count = 0

    async def keep_scoring() -> None:
        nonlocal count
        while time.monotonic() < until:
            rollouts = [Rollout(text=RESPONSE, token_ids=[1]) for _ in range(RESPONSES)]
            await pool.score(prompt, rollouts)
            assert all(one.reward is not None for one in rollouts), rollouts[0].reward_failure
            count += RESPONSES

    await asyncio.gather(*(keep_scoring() for _ in range(at_once)))
    return count


def measure(args: argparse.Namespace, command: str) -> None:
    """Measures all in turn, and appends a record of each."""
    found: dict[Case, list[float]] = {case: [] for case in CASES}
    with answering() as url, served(args.folder) as of_vllm:
        for _ in range(args.repeats):
            for case in CASES:
                found[case].append(speed(reward_of(case, url, of_vllm), case, args))
    for case, speeds in found.items():
        rounded = [records.rounded(one) for one in speeds]
        records.append(args.out, settings_of(case, args) | {"speeds": rounded, "command": command})


def settings_of(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields by which a record is found."""
    sizes = {name: getattr(args, name) for name in ("at_once", "seconds", "repeats")}
    return {"reward": case.kind, "workers": case.workers, "latency_ms": case.latency_ms, **sizes}


def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the fields by which the records are found, in their order."""
    return [settings_of(case, args) for case in CASES]


def table(made: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown: medians, with the least and the most."""
    lines = [HEAD]
    plain = statistics.median(made[0]["speeds"])
    for one in made:
        speeds = one["speeds"]
        middle = statistics.median(speeds)
        case = Case(one["reward"], one["workers"], one["latency_ms"])
        cells = [
            f"`{case.kind}`" if case.kind in ("Judge", "RewardModel") else case.kind,
            f"{case.latency_ms} ms" if case.latency_ms else "",
            case.workers,
            f"{middle:,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})",
            f"{middle / plain:.3f}",
            f"{middle / case.most:.2f}" if case.latency_ms else "",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model_rewards", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each (%(default)s)")
    parser.add_argument("--at-once", type=int, default=32, help="groups in flight (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    arguments.add_print_only(parser, "model_rewards")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, unless it only prints; then prints."""
    return arguments.measure_and_print(make_parser(), argv, measure, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())
