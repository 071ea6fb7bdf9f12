"""Memory of rank 0 and of the agents' process over thousands of episodes, without a server.

    python -m benchmarks.agent_memory
    python -m benchmarks.agent_memory --no-token-cache      the tokenizer remembers no text

The agents, the tokenizer and the half that changes its history are those of `token_truth`; in the
place of a policy stand random tokens. So what grows belongs to lrl or to its libraries. For each
process: the objects of Python, what malloc has given out, and what malloc keeps although it is
free. A leak grows with the episodes in one of the first two.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from transformers import PreTrainedTokenizerFast

from benchmarks import arguments, records
from benchmarks.talking_agent import talk
from benchmarks.token_truth import (
    END,
    ENDS,
    EPISODE_TOKENS,
    TURN_TOKENS,
    TURNS,
    Bench,
    make_policy,
)
from lrl.environments import Agent
from lrl.rollouts.controller import ResponseWriter
from lrl.rollouts.environment_of_run import EnvironmentOfRun, EpisodeSettings
from lrl.types import Group, Prompt, Rollout, Sampling

HEAD = (
    "| process | episodes | blocks of Python | malloc in use, MiB | free in malloc, MiB "
    "| resident, MiB |\n|---|---|---|---|---|---|"
)
_ended = 0
"""Episodes of this process."""


class _Mallinfo2(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def memory() -> list[float]:
    """Returns the blocks of Python, and in MiB: in use and free in malloc, and resident."""
    gc.collect()
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    resident = psutil.Process().memory_info().rss
    sizes = (found.uordblks + found.hblkhd, found.fordblks, resident)
    return [sys.getallocatedblocks(), *(round(size / 2**20, 1) for size in sizes)]


async def watched(*, log: str, every: int, **columns: Any) -> float:
    """Talks; notes the memory of this process every so many episodes."""
    global _ended
    await talk(**columns)
    _ended += 1
    if _ended % every == 0:
        with Path(log).open("a") as file:
            file.write(json.dumps([_ended, *memory()]) + "\n")
    return 1.0


def policy(end: int) -> Callable[..., Any]:
    """Returns what writes turns of random tokens, in the place of a pool."""
    rng = random.Random(0)

    async def generate(
        prompt: Prompt,
        rollouts: list[Rollout],
        sampling: Sampling,
        *,
        verified: Callable[[], None],
        **how: Any,
    ) -> None:
        for rollout in rollouts:
            written = [rng.randrange(2, 512) for _ in range(rng.randrange(4, 28))] + [end]
            rollout.token_ids += written
            rollout.logprobs += [0.0] * len(written)
            rollout.versions += [0] * len(written)
            rollout.finish_reason = "stop"
        verified()
        await asyncio.sleep(0)

    return generate


async def play_all(
    episodes: ResponseWriter, end: int, args: argparse.Namespace
) -> list[list[float]]:
    """Keeps agents talking; returns the memory of this process every so many episodes."""
    found: list[list[float]] = []
    begun = ended = 0

    async def keep_playing(agent: int) -> None:
        nonlocal begun, ended
        while begun < args.episodes:
            begun += 1
            columns = {"turns": TURNS, "changes": agent % 2 == 1, "every": args.every}
            columns["log"] = str(args.folder / "agents.jsonl")
            prompt = Prompt(id=agent, token_ids=[], text="go", columns=columns)
            group = Group(index=agent, prompt=prompt, rollouts=[Rollout()])
            sampling = Sampling(max_tokens=EPISODE_TOKENS, stop_tokens=(end,))
            await episodes.generate(prompt, group.rollouts, sampling)
            assert not group.rollouts[0].failure, group.rollouts[0].failure
            ended += 1
            if ended % args.every == 0:
                found.append([ended, *memory()])

    await asyncio.gather(*map(keep_playing, range(args.at_once)))
    return found


async def measure(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the memory of both processes."""
    agent = Agent(watched)
    agent.stop = ENDS
    settings = EpisodeSettings(max_turns=TURNS, max_turn_tokens=TURN_TOKENS)
    of_run = EnvironmentOfRun(agent, settings, EPISODE_TOKENS)
    text = Bench(None, None, tokenizer).text  # type: ignore[arg-type]
    of_run.start(text, None, parses=False)
    end = tokenizer.convert_tokens_to_ids(END)
    try:
        own = await play_all(of_run.episodes(policy(end), text), end, args)
    finally:
        of_run.close()
    of_agents = (args.folder / "agents.jsonl").read_text().splitlines()
    return {"rank 0": own, "agents": [json.loads(line) for line in of_agents]}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, appends the record and prints it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agent_memory", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--episodes", type=int, default=6000, help="(%(default)s)")
    parser.add_argument("--at-once", type=int, default=64, help="agents (%(default)s)")
    parser.add_argument("--every", type=int, default=1000, help="episodes a line (%(default)s)")
    parser.add_argument("--no-token-cache", action="store_true")
    arguments.add_places(parser, "agent_memory", plot=False)
    args = arguments.parse(parser, argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "agents.jsonl").unlink(missing_ok=True)
    tokenizer = make_policy(args.folder / "policy")
    if args.no_token_cache:
        tokenizer.backend_tokenizer.model._resize_cache(0)
    found = asyncio.run(measure(tokenizer, args))
    records.append(args.out, found | {"command": args.command})
    print(HEAD)
    for process, lines in found.items():
        for line in lines:
            print(f"| {process} | {' | '.join(f'{value:,}' for value in line)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
