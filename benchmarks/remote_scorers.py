"""Responses scored a second on one node (the trainer's) and on two (a scorer beside it), each of
one core.

    python -m benchmarks.remote_scorers
    python -m benchmarks.remote_scorers --groups 20 --repeats 1     a rehearsal

A node is a core: the pool and its one worker are pinned to the first, `lrl join --kind scorer` with
one worker to the second. The scorer is a process of this machine and joins over loopback.
`--at-once` groups are in flight, as in a run whose generators write faster than the rewards score.
Both ways take turns, and each is measured `--repeats` times.

`ExactMatch` compares two strings, so what is measured is the way of a job; it gets `TIMES` as many
groups. `Math` works an expression out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import arguments, records
from lrl.generators.settings import ServerSettings
from lrl.members.admission import poll_forever
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind
from lrl.members.registry import Registry
from lrl.members.service import RegistryServer
from lrl.members.worker_admission import WorkerAdmission
from lrl.rewards import ExactMatch, Math, Reward, RewardPool
from lrl.system.endpoint import Endpoint
from lrl.system.event_loop import LoopThread
from lrl.types import Prompt, Rollout

TIMES = {"ExactMatch": 20, "Math": 1}
START_S = 120.0
FILLER = "We look at both sides, collect the terms, and divide by what stands before the unknown. "
HEAD = (
    "| reward | nodes | responses a second | of one node | scored by the scorer "
    "|\n|---|---|---|---|---|"
)


def reward_of(name: str) -> Reward:
    """Returns the reward of that name."""
    return Math() if name == "Math" else ExactMatch("answer")


def prompts(name: str, groups: int) -> list[Prompt]:
    """Returns problems whose answer is a fraction, for `Math`, or a text."""
    answers = [
        f"\\frac{{{n % 97 + 1}}}{{{n % 13 + 2}}}" if name == "Math" else f"answer {n}"
        for n in range(groups)
    ]
    return [
        Prompt(id=n, token_ids=[1], text="Solve it.", columns={"answer": each})
        for n, each in enumerate(answers)
    ]


def rollouts(name: str, prompt: Prompt, count: int) -> list[Rollout]:
    """Returns responses of some hundred words; every second one is right, in another form."""
    number = prompt.id
    right = (
        f"\\boxed{{{2 * (number % 97 + 1)}/{2 * (number % 13 + 2)}}}"
        if name == "Math"
        else prompt.columns["answer"]
    )
    wrong = f"\\boxed{{\\sqrt{{{number + 2}}}}}" if name == "Math" else "another"
    texts = [
        (FILLER * 8 if name == "Math" else "") + (wrong if n % 2 else right) for n in range(count)
    ]
    tokens: dict[str, Any] = {
        "token_ids": [1],
        "logprobs": [0.0],
        "versions": [0],
        "finish_reason": "stop",
    }
    return [Rollout(text=text, **tokens) for text in texts]


@contextlib.contextmanager
def served(pool: RewardPool, core: int) -> Iterator[None]:
    """Gives the pool a scorer on this core."""
    token = secrets.token_urlsafe(32)
    spec = JoinSpec(
        "none",
        asdict(ServerSettings()),
        "pull",
        run_id=secrets.token_hex(4),
        on_cpu=True,
        generators=0,
    )
    registry, loop = Registry(spec), LoopThread()
    terms = {Kind.SCORER: pool.remote.terms}
    server = RegistryServer(registry, Endpoint(), token, terms=terms)
    loop.submit(poll_forever(WorkerAdmission(Kind.SCORER, pool.remote, registry, token).poll))
    lrl = str(Path(sys.executable).with_name("lrl"))
    words = [
        "taskset",
        "-c",
        str(core),
        lrl,
        "join",
        server.location().url,
        "--kind",
        "scorer",
        "--workers",
        "1",
    ]
    scorer = subprocess.Popen(
        words, env=os.environ | {"LRL_TOKEN": token}, stdout=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + START_S
        while not pool.remote.ready:
            if time.monotonic() > until or scorer.poll() is not None:
                raise SystemExit("The scorer has not joined; its own message is above.")
            time.sleep(0.1)
        yield
    finally:
        pool.remote.close()
        registry.end()
        scorer.wait(30)
        loop.close()
        server.close()


def speed(pool: RewardPool, name: str, args: argparse.Namespace) -> float:
    """Scores all groups; returns responses a second."""
    groups = args.groups * TIMES[name]
    work = [(prompt, rollouts(name, prompt, args.responses)) for prompt in prompts(name, groups)]

    async def score_all() -> None:
        slots = asyncio.Semaphore(args.at_once)

        async def score(prompt: Prompt, group: list[Rollout]) -> None:
            async with slots:
                await pool.score(prompt, group)

        await asyncio.gather(*(score(*each) for each in work))

    began = time.perf_counter()
    asyncio.run(score_all())
    seconds = time.perf_counter() - began
    judged = [rollout.reward for _, group in work for rollout in group]
    assert judged == [float(n % 2 == 0) for n in range(args.responses)] * groups, (
        "every second one is right"
    )
    return len(judged) / seconds


def measure(args: argparse.Namespace, command: str) -> None:
    """Measures what is not there yet."""
    first, second = args.cores
    os.sched_setaffinity(0, {first})  # the workers inherit it
    for wanted in runs_of(args):
        if wanted["nodes"] == 2 or records.find(records.read(args.out), wanted) is not None:
            continue
        alone, with_scorer = (
            RewardPool([reward_of(wanted["reward"])], workers=1) for _ in range(2)
        )
        found: dict[int, list[float]] = {1: [], 2: []}
        alone.start()
        with_scorer.start()
        try:
            with served(with_scorer, second):
                for pool in (alone, with_scorer):  # the first jobs import and parse
                    speed(pool, wanted["reward"], args)
                before = dict(with_scorer.scored_by)
                for _ in range(args.repeats):
                    for nodes, pool in ((1, alone), (2, with_scorer)):
                        found[nodes].append(speed(pool, wanted["reward"], args))
        finally:
            alone.close()
            with_scorer.close()
        scored = {
            name: count - before.get(name, 0) for name, count in with_scorer.scored_by.items()
        }
        shares = {1: 0.0, 2: 1 - scored["rank 0"] / sum(scored.values())}
        for nodes, speeds in found.items():
            fields = {
                "speeds": [records.rounded(each) for each in speeds],
                "share": records.rounded(shares[nodes]),
            }
            records.append(args.out, wanted | {"nodes": nodes, **fields, "command": command})
            logging.info("%s, %d nodes: %s", wanted["reward"], nodes, fields)


def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the fields by which the records are found, in their order."""
    size = {
        "groups": args.groups,
        "responses": args.responses,
        "at_once": args.at_once,
        "repeats": args.repeats,
    }
    return [{"reward": name, "nodes": nodes, **size} for name in args.rewards for nodes in (1, 2)]


def table(made: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown: medians, with the least and the most."""
    lines = [HEAD]
    alone = {one["reward"]: statistics.median(one["speeds"]) for one in made if one["nodes"] == 1}
    for one in made:
        middle = statistics.median(one["speeds"])
        speeds = f"{middle:,.0f} ({min(one['speeds']):,.0f} to {max(one['speeds']):,.0f})"
        times = f"{middle / alone[one['reward']]:.2f}"
        lines.append(
            f"| `{one['reward']}` | {one['nodes']} | {speeds} | {times} | {one['share']:.0%} |"
        )
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.remote_scorers", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--rewards", nargs="+", choices=list(TIMES), default=list(TIMES), help="(%(default)s)"
    )
    parser.add_argument(
        "--cores", nargs=2, type=int, default=[0, 1], help="one for each node (%(default)s)"
    )
    parser.add_argument(
        "--groups", type=int, default=250, help="scored each time, of Math (%(default)s)"
    )
    parser.add_argument("--responses", type=int, default=8, help="of a group (%(default)s)")
    parser.add_argument("--at-once", type=int, default=32, help="groups in flight (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(%(default)s)")
    arguments.add_print_only(parser, "remote_scorers")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, unless it only prints; then prints."""
    return arguments.measure_and_print(make_parser(), argv, measure, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())
