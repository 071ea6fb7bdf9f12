"""Turns and episodes a second on a real vLLM server, beside single requests, and what a tool of a
second costs.

    python -m benchmarks.turns
    python -m benchmarks.turns --groups 4 --in-flight 4 --repeats 1 --out runs/turns/r.jsonl     a rehearsal

The quickstart's policy plays with the calculator: the real loop of episodes, processes of the
environment, and pool, without a trainer. Each round does in turn:

- episodes: `--groups` groups of `--responses` episodes at once;
- requests: as many single responses as the episodes had turns, of as many tokens as a turn had, each
  a request of its own;
- responses: as many single responses as there were episodes, of as many tokens as an episode's
  turns had together, those of a group in one request.

Then a flow: `--in-flight` groups at any time, as pacing lets (max_lag + 1) x groups_per_step be
without waiting for a trainer; another begins when one ends. The calculator answers at once, and
after `--tool` seconds. Of the second no more than

    in flight / (seconds of a group alone + tool seconds of its longest episode)

groups a second can end, and no more than of the first. What ends is compared with that.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from benchmarks import arguments, records
from benchmarks.slow_calculator import SlowCalculator
from lrl.environments import Environment
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.quickstart.calculator import Calculator
from lrl.quickstart.task import problems
from lrl.quickstart.warmup import make_policy
from lrl.rollouts.controller import ResponseWriter
from lrl.rollouts.environment_of_run import EnvironmentOfRun
from lrl.rollouts.episode_settings import EpisodeSettings
from lrl.rollouts.response_text import PolicyText, decoded
from lrl.rollouts.stop_tokens import stop_tokens
from lrl.types import Prompt, Rollout, Sampling

EPISODE_TOKENS = 32
"""As in the recipe calculator."""
DEADLINE_S = 600.0
SLOTS = 512
"""Responses that the server writes at once."""
WAYS = ("episodes", "requests", "responses")


@dataclass(frozen=True)
class Written:
    """What one way wrote."""

    seconds: float
    groups: list[list[Rollout]]

    @property
    def rollouts(self) -> list[Rollout]:
        """All of them."""
        return [rollout for group in self.groups for rollout in group]

    @property
    def turns(self) -> int:
        """Turns of all episodes."""
        return sum(len(rollout.turn_ends) for rollout in self.rollouts)

    @property
    def tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(rollout.num_tokens for rollout in self.rollouts)


@dataclass(frozen=True)
class Bench:
    """The running server, with prompts.

    Args:
        pool: Its pool.
        folder: Of the policy.
        tokenizer: The policy's.
        prompts: One for each group.
        responses: Responses to each prompt.
    """

    pool: GeneratorPool
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[Prompt]
    responses: int

    def environment(self, environment: Environment) -> EnvironmentOfRun:
        """Returns an environment of a run with its processes; `close` it."""
        return EnvironmentOfRun(environment, EpisodeSettings(), EPISODE_TOKENS)

    def episodes(self, of_run: EnvironmentOfRun) -> ResponseWriter:
        """Returns what plays episodes of an environment."""
        text = PolicyText(
            tokenizer=self.tokenizer,
            ends=frozenset(self.ends()),
            decode=lambda tokens, before: decoded(self.tokenizer, tokens, True),
        )
        of_run.start(text, first=None, parses=False)
        return of_run.episodes(self.pool.generate, text)

    def sampling(self) -> Sampling:
        """Returns the sampling of episodes."""
        ends = tuple(sorted(self.ends()))
        return Sampling(n=self.responses, max_tokens=EPISODE_TOKENS, stop_tokens=ends)

    def ends(self) -> set[int]:
        """Returns the tokens that end a response."""
        return set(stop_tokens(self.tokenizer, str(self.folder)))


async def write(
    writer: Any, prompt: Prompt, sampling: Sampling, responses: int, number: int
) -> list[Rollout]:
    """Returns the rollouts of a request, or of a group of episodes."""
    rollouts = [Rollout() for _ in range(responses)]
    how: dict[str, Any] = {"priority": number, "due": 0, "deadline_s": DEADLINE_S}
    await writer(prompt, rollouts, replace(sampling, n=responses), **how)
    assert all(rollout.finished and not rollout.failure for rollout in rollouts)
    return rollouts


async def at_once(
    bench: Bench, writer: Any, sampling: Sampling, requests: int, responses: int
) -> Written:
    """Writes so many requests at once."""
    prompts = [bench.prompts[number % len(bench.prompts)] for number in range(requests)]
    began = time.perf_counter()
    works = [
        write(writer, prompt, sampling, responses, number) for number, prompt in enumerate(prompts)
    ]
    groups = await asyncio.gather(*works)
    return Written(time.perf_counter() - began, list(groups))


async def one_round(bench: Bench, episodes: ResponseWriter) -> dict[str, float]:
    """Returns what each way writes a second, and the ratios."""
    groups, each = len(bench.prompts), bench.responses
    played = await at_once(bench, episodes.generate, bench.sampling(), groups, each)
    turn = Sampling(max_tokens=max(1, round(played.tokens / played.turns)))
    whole = Sampling(max_tokens=max(1, round(played.tokens / (groups * each))))
    single = await at_once(bench, bench.pool.generate, turn, played.turns, 1)
    shared = await at_once(bench, bench.pool.generate, whole, groups, each)
    return {
        "turns_an_episode": played.turns / (groups * each),
        "tokens_a_turn": turn.max_tokens,
        "tokens_an_episode": whole.max_tokens,
        "turns": played.turns / played.seconds,
        "episodes": groups * each / played.seconds,
        "requests": played.turns / single.seconds,
        "responses": groups * each / shared.seconds,
        "turns_to_requests": single.seconds / played.seconds,
        "episodes_to_responses": shared.seconds / played.seconds,
    }


async def flow(bench: Bench, episodes: ResponseWriter, in_flight: int) -> dict[str, float]:
    """Keeps so many groups in flight until four times as many have ended; returns the groups that
    ended a second in the middle half, and the mean of the most turns of a group."""
    total, ends = 4 * in_flight, list[float]()
    longest = list[int]()
    places = asyncio.Semaphore(in_flight)
    sampling = bench.sampling()

    async def one(number: int) -> None:
        async with places:
            prompt = bench.prompts[number % len(bench.prompts)]
            rollouts = await write(episodes.generate, prompt, sampling, bench.responses, number)
        ends.append(time.perf_counter())
        longest.append(max(len(rollout.turn_ends) for rollout in rollouts))

    await asyncio.gather(*map(one, range(total)))
    seconds = ends[total - in_flight - 1] - ends[in_flight - 1]
    return {"groups": (total - 2 * in_flight) / seconds, "most_turns": mean(longest)}


async def flows(bench: Bench, tool_s: float, in_flight: int) -> dict[str, float]:
    """Returns the groups a second without and with a tool, and the bound of pacing."""
    figures: dict[str, float] = {}
    for name, seconds in (("quick", 0.0), ("slow", tool_s)):
        of_run = bench.environment(SlowCalculator(seconds))
        try:
            episodes = bench.episodes(of_run)
            for _ in range(2):  # the first one starts the process
                alone = await at_once(
                    bench, episodes.generate, bench.sampling(), 1, bench.responses
                )
            figures[f"{name}_alone_s"] = alone.seconds
            found = await flow(bench, episodes, in_flight)
        finally:
            of_run.close()
        figures |= {f"{name}_{key}": value for key, value in found.items()}
    alone_s = figures["quick_alone_s"] + tool_s * figures["slow_most_turns"]
    bound = min(figures["quick_groups"], in_flight / alone_s)
    return figures | {
        "bound_groups": bound,
        "bound_busy": bound / figures["quick_groups"],
        "busy": figures["slow_groups"] / figures["quick_groups"],
        "of_the_bound": figures["slow_groups"] / bound,
    }


async def measure(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Returns the figures of all rounds."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(server.model)
    prompts = [
        Prompt(id=number, token_ids=tokenizer.encode(row["prompt"]), text=row["prompt"])
        for number, row in enumerate(problems()[: args.groups])
    ]
    generator = Generator(server, capacity=SLOTS)
    await generator.client.post(
        "/update_weight_version", {"new_version": "0"}, deadline_s=DEADLINE_S
    )
    generator.version = 0
    generator.verify()
    bench = Bench(
        pool=GeneratorPool([generator]),
        folder=Path(server.model),
        tokenizer=tokenizer,
        prompts=prompts,
        responses=args.responses,
    )
    try:
        of_run = bench.environment(Calculator())
        try:
            episodes = bench.episodes(of_run)
            await one_round(bench, episodes)  # warms up
            rounds = [await one_round(bench, episodes) for _ in range(args.repeats)]
        finally:
            of_run.close()
        tools = [await flows(bench, args.tool, args.in_flight) for _ in range(args.repeats)]
    finally:
        await generator.client.close()
    return spread(rounds) | {f"flow_{name}": value for name, value in spread(tools).items()}


def spread(rounds: Sequence[dict[str, float]]) -> dict[str, list[float | None]]:
    """Returns least, median and most of each figure."""
    columns = {name: [one[name] for one in rounds] for name in rounds[0]}
    return {
        name: [records.rounded(value) for value in (min(column), median(column), max(column))]
        for name, column in columns.items()
    }


def table(record: dict[str, Any]) -> str:
    """Returns the measurement as two tables."""

    def cell(name: str, form: str) -> str:
        least, middle, most = record[name]
        return f"{middle:{form}} ({least:{form}} to {most:{form}})"

    rates = {
        "turns": "turns",
        "requests": "single requests",
        "episodes": "episodes",
        "responses": "single responses, a request a group",
    }
    lines = ["| | a second |", "|---|---|"]
    lines += [f"| {words} | {cell(name, '.0f')} |" for name, words in rates.items()]
    lines += [
        f"| turns to requests | {cell('turns_to_requests', '.2f')} |",
        f"| episodes to responses | {cell('episodes_to_responses', '.2f')} |",
        "",
        f"| groups in flight: {record['in_flight']} | |",
        "|---|---|",
        f"| groups a second, no wait | {cell('flow_quick_groups', '.2f')} |",
        f"| with a tool of {record['tool_s']:g} s | {cell('flow_slow_groups', '.2f')} |",
        f"| generator as busy as without | {cell('flow_busy', '.2f')} |",
        f"| pacing allows | {cell('flow_bound_busy', '.2f')} |",
        f"| of that | {cell('flow_of_the_bound', '.2f')} |",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, appends the record and prints it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.turns", description="Turns and episodes a second."
    )
    parser.add_argument("--groups", type=int, default=32, help="at once (%(default)s)")
    parser.add_argument("--responses", type=int, default=16, help="of a group (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (%(default)s)")
    parser.add_argument("--in-flight", type=int, default=32, help="groups of a flow (%(default)s)")
    parser.add_argument("--tool", type=float, default=1.0, help="its seconds (%(default)s)")
    arguments.add_places(parser, "turns", plot=False)
    args = arguments.parse(parser, argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    policy = make_policy(args.folder / "policy", seed=0)
    settings = ServerSettings(
        max_model_len=64, max_num_seqs=SLOTS, dtype="float32", kv_cache_gib=0.5
    )
    run_id = secrets.token_hex(4)
    server = Server(str(policy), settings, "shared_memory", [], args.folder, 0, run_id)
    server.start()
    try:
        server.wait_ready()
        figures = asyncio.run(measure(args, server))
    finally:
        server.stop()
    sizes = {
        "groups": args.groups,
        "responses_each": args.responses,
        "in_flight": args.in_flight,
        "tool_s": args.tool,
        "repeats": args.repeats,
    }
    record = sizes | figures | {"command": args.command}
    records.append(args.out, record)
    print(table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
