"""Agents of other people's libraries through `lrl.environments.Agent`: what each sends, turn by turn.

    python -m benchmarks.other_agents pydantic_ai=PYTHON openai_agents=PYTHON langgraph=PYTHON ...

PYTHON is that of an environment with the library (`benchmarks/agents/`). In the place of a policy
stands a script of two turns: it calls the tool `add`, and says the result, or gives it to the tool
with which smolagents ends. An agent that lrl can train ends with that, in two turns.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from lrl.environments import Agent, ToolCall, Written
from lrl.environments.chat_request import NEUTRAL, NEVER_NEUTRAL
from lrl.environments.play import Play, Reply

PROGRAMS = Path(__file__).parent / "agents"
PROMPT = "What is 2 + 3? Use the tool."
TURNS = (
    Written("", [1], [ToolCall("add", '{"a": 2, "b": 3}', "t0000c000")], ""),
    Written("The sum is 5.", [2], content="The sum is 5."),
)
FINAL = Written("", [2], [ToolCall("final_answer", '{"answer": "5"}', "t0001c000")], "")
LAST_TURNS = {"smolagents": FINAL}
DEADLINE_S = 120.0


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
        branches += reply.result().after is not None
        if reply.result().done:
            return f"{taken} turns, {branches} branches, ended"
        if taken == len(turns):
            task.cancel()
            return f"{taken} turns, asks on"
        playing.wrote(turns[taken])
        taken += 1


async def shown(name: str, python: str) -> str:
    """Returns a line of the table."""
    cells = [name]
    for ignore in ((), (*NEUTRAL, *NEVER_NEUTRAL)):
        agent = Agent(command=[python, str(PROGRAMS / f"{name}_adds.py")], ignore=ignore)
        turns = [TURNS[0], LAST_TURNS.get(name, TURNS[1])]
        try:
            cells.append(await asyncio.wait_for(play(agent, turns), DEADLINE_S))
        except TimeoutError:
            cells.append(f"not at its end after {DEADLINE_S:g} s")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Plays and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.other_agents", description=__doc__.splitlines()[0]
    )
    parser.add_argument("agents", nargs="+", help="NAME=PYTHON")
    found = dict(one.split("=", 1) for one in parser.parse_args().agents)
    print("| agent | as it is | with `ignore` of all settings |\n|---|---|---|")
    for name, python in found.items():
        print(asyncio.run(shown(name, python)), flush=True)


if __name__ == "__main__":
    main()
