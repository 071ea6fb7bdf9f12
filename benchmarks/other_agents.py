"""Agents of other people's libraries through `lrl.environments.Agent`: what each sends, turn by turn.

    python -m benchmarks.other_agents pydantic_ai=PYTHON openai_agents=PYTHON langgraph=PYTHON ...

PYTHON is that of an environment with the library (`benchmarks/agents/`). In the place of a policy
stands a script of two turns: it calls the tool `add`, and says the result, or gives it to the tool
with which smolagents ends; to the environments of verifiers and OpenEnv it says two words. An agent
that lrl can train ends with that, in two turns; one that does not is played again with `ignore` of
all settings. What was seen is added to `benchmarks/results/other_agents.jsonl`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from lrl.environments import Agent, ToolCall, Written
from lrl.environments.chat_request import NEUTRAL, NEVER_NEUTRAL
from lrl.environments.play import Play, Reply

PROGRAMS = Path(__file__).parent / "agents"
RESULTS = Path(__file__).parent / "results" / "other_agents.jsonl"
PROMPT = "What is 2 + 3? Use the tool."
CALL = Written("", [1], [ToolCall("add", '{"a": 2, "b": 3}', "t0000c000")], "")
ADDS = (CALL, Written("The sum is 5.", [2], content="The sum is 5."))
ADDS_BY_TOOLS = (CALL, Written("", [2], [ToolCall("final_answer", '{"answer": "5"}', "t1c0")], ""))
SAYS = (
    Written("Hello", [1], content="Hello"),
    Written("Good evening", [2], content="Good evening"),
)
"""Of the echo environment they are worth 0.5, and 1 (OpenEnv 0.10) or 1.2 (0.4)."""
PROGRAMS_AND_TURNS: dict[str, tuple[str, Sequence[Written]]] = {
    "pydantic_ai": ("pydantic_ai_adds.py", ADDS),
    "openai_agents": ("openai_agents_adds.py", ADDS),
    "langgraph": ("langgraph_adds.py", ADDS),
    "smolagents": ("smolagents_adds.py", ADDS_BY_TOOLS),
    "openenv": ("openenv_echoes.py", SAYS),
    "verifiers": ("verifiers_plays.py", SAYS),
}
DEADLINE_S = 900.0
"""Of an episode. The first one of verifiers prepares an environment for its harness."""
VERSIONS = """
import importlib.metadata as packages, json
print(json.dumps({one.name: one.version for one in packages.distributions()}))
"""


async def play(agent: Agent, turns: Sequence[Written]) -> str:
    """Plays one episode; returns the turns that the agent has taken, and how it ended."""
    replies: asyncio.Queue[Reply] = asyncio.Queue()
    playing = Play(agent, replies.put_nowait)
    task = asyncio.ensure_future(playing.run(PROMPT, {}))
    taken, branches = 0, 1
    while True:
        reply = asyncio.ensure_future(replies.get())
        await asyncio.wait({reply, task}, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done():
            reply.cancel()
            return f"{taken} turns, failed: {task.exception()}"
        found = reply.result()
        branches += found.after is not None
        if found.done:
            reward = f" with reward {found.reward:g}" if found.reward else ""
            return f"{taken} turns, {branches} branches, ended{reward}"
        if taken == len(turns):
            task.cancel()
            return f"{taken} turns, asks on"
        playing.wrote(turns[taken])
        taken += 1


async def seen(name: str, python: str, ignore: Sequence[str]) -> str:
    """Returns what an agent does, whose requests' settings `ignore` are left out."""
    program, turns = PROGRAMS_AND_TURNS[name]
    agent = Agent(command=[python, str(PROGRAMS / program)], ignore=ignore)
    try:
        return await asyncio.wait_for(play(agent, turns), DEADLINE_S)
    except TimeoutError:
        return f"not at its end after {DEADLINE_S:g} s"


def record_of(name: str, python: str) -> dict[str, Any]:
    """Plays an agent; returns what was seen."""
    found = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    as_it_is = asyncio.run(seen(name, python, ()))
    with_ignore = ""
    if "ended" not in as_it_is:
        with_ignore = asyncio.run(seen(name, python, (*NEUTRAL, *NEVER_NEUTRAL)))
    return {
        "agent": name,
        "as_it_is": as_it_is,
        "with_ignore": with_ignore,
        "command": f"python -m benchmarks.other_agents {name}=PYTHON",
        "packages": dict(sorted(json.loads(found.stdout).items())),
    }


def main() -> None:
    """Plays, records and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.other_agents", description=__doc__.splitlines()[0]
    )
    parser.add_argument("agents", nargs="+", help="NAME=PYTHON")
    agents = dict(one.split("=", 1) for one in parser.parse_args().agents)
    print("| agent | as it is | with `ignore` of all settings |\n|---|---|---|")
    for name, python in agents.items():
        record = record_of(name, python)
        records.append(RESULTS, record)
        print(f"| {name} | {record['as_it_is']} | {record['with_ignore']} |", flush=True)


if __name__ == "__main__":
    main()
