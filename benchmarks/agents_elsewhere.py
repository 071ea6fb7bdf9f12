"""Agents that lrl does not start, many at once: whether each of their episodes is played once and
ends, and how long a request waits.

    python -m benchmarks.agents_elsewhere

The run's real server for them, on the loop of rank 0; the agents are in other processes, and each of
their episodes and requests has a connection of its own. The agents, the tokenizer and the half that
changes its history are those of `token_truth`, in the place of a policy stand the random tokens of
`agent_memory`. When all episodes have ended, the run ends, and each agent with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

import aiohttp
from transformers import PreTrainedTokenizerFast

from benchmarks import arguments, records
from benchmarks.agent_memory import policy
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
from lrl.rollouts.environment_of_run import EnvironmentOfRun
from lrl.rollouts.episode_settings import EpisodeSettings
from lrl.system.endpoint import Endpoint
from lrl.types import Prompt, Rollout, Sampling

HEAD = (
    "| agents | episodes | taken | ended | failed | turns a second | seconds of an episode, median "
    "and longest |\n|---|---|---|---|---|---|---|"
)

Span = tuple[float, float]
"""When an episode was taken, and when it ended, on the clock of the machine."""


async def plays(url: str, key: str, found: Counter[str], times: list[Span], odd: bool) -> None:
    """Plays one episode after the other, until the run ends."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        while True:
            try:
                async with session.post(url) as answer:
                    status, episode = answer.status, await answer.json()
            except aiohttp.ClientError:  # the run has ended
                found["agents that ended"] += 1
                return
            if status == 429:
                found["asked when none waited"] += 1
                await asyncio.sleep(float(answer.headers["Retry-After"]))
                continue
            assert status == 200, episode
            found["taken"] += 1
            began = time.monotonic()
            place = {"base_url": episode["base_url"], "api_key": episode["api_key"]}
            await talk(**place, turns=TURNS, changes=odd)
            headers = {"Authorization": f"Bearer {episode['api_key']}"}
            async with session.post(
                f"{episode['base_url']}/end", json={"reward": 1.0}, headers=headers
            ) as answer:
                assert answer.status == 200, await answer.text()
            found["ended"] += 1
            times.append((began, time.monotonic()))


def play_many(url: str, key: str, agents: int) -> tuple[Counter[str], list[Span]]:
    """Runs agents in this process; returns what they count, and the times of their episodes."""
    found: Counter[str] = Counter()
    times: list[Span] = []

    async def together() -> None:
        playing = [plays(url, key, found, times, odd=number % 2 == 1) for number in range(agents)]
        await asyncio.gather(*playing)

    asyncio.run(together())
    return found, times


async def write_all(episodes: ResponseWriter, end: int, args: argparse.Namespace) -> list[Rollout]:
    """Keeps `--in-flight` episodes open, until there were `--episodes`; returns all."""
    found: list[Rollout] = []

    async def keep_open(number: int) -> None:
        while len(found) < args.episodes:
            rollout = Rollout()
            found.append(rollout)
            prompt = Prompt(id=number, token_ids=[], text="go")
            sampling = Sampling(max_tokens=EPISODE_TOKENS, stop_tokens=(end,))
            await episodes.generate(prompt, [rollout], sampling)

    await asyncio.gather(*map(keep_open, range(args.in_flight)))
    return found


async def measure(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what both sides have counted."""
    agent = Agent(port=0)
    agent.stop = ENDS
    settings = EpisodeSettings(max_turns=TURNS, max_turn_tokens=TURN_TOKENS)
    of_run = EnvironmentOfRun(agent, settings, EPISODE_TOKENS)
    assert of_run.external is not None, "no agent is started"
    of_run.external.listen(Endpoint(), args.folder)
    address = json.loads((args.folder / "agents" / "address.json").read_text())
    where = (f"{address['url']}/episodes", address["key"], args.agents // args.processes)
    text = Bench(None, None, tokenizer).text  # type: ignore[arg-type]
    end = tokenizer.convert_tokens_to_ids(END)
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as processes:
        writing = asyncio.ensure_future(write_all(of_run.episodes(policy(end), text), end, args))
        await asyncio.sleep(1.0)  # the first episode that waits opens the server
        playing = [
            loop.run_in_executor(processes, play_many, *where) for _ in range(args.processes)
        ]
        rollouts = await writing
        of_run.close()
        theirs = await asyncio.gather(*playing)
    counts = sum((found for found, _ in theirs), Counter[str]())
    times = [span for _, found in theirs for span in found]
    each = [end - began for began, end in times]
    seconds = max(end for _, end in times) - min(began for began, _ in times)
    return {
        "agents": args.agents,
        "episodes": len(rollouts),
        "failures": Counter(one.failure for one in rollouts if one.failure),
        "finish_reasons": Counter(str(one.finish_reason) for one in rollouts),
        "restarted": of_run.external.counts["restarted"],
        "turns": sum(len(one.turns) for one in rollouts),
        "seconds": seconds,
        "of_an_episode": {"median": median(each), "longest": max(each)},
        "of_agents": counts,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, appends the record and prints it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agents_elsewhere", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--agents", type=int, default=128, help="at once (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="of agents (%(default)s)")
    parser.add_argument("--episodes", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--in-flight", type=int, default=256, help="of the run (%(default)s)")
    arguments.add_places(parser, "agents_elsewhere", plot=False)
    args = arguments.parse(parser, argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(measure(make_policy(args.folder / "policy"), args))
    records.append(args.out, found | {"command": args.command})
    counts, of_each = found["of_agents"], found["of_an_episode"]
    row = (
        found["agents"],
        found["episodes"],
        counts["taken"],
        counts["ended"],
        sum(found["failures"].values()),
        round(found["turns"] / found["seconds"]),
        f"{of_each['median']:.2f} and {of_each['longest']:.2f}",
    )
    print(f"{HEAD}\n| {' | '.join(map(str, row))} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
