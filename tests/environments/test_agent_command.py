"""A program as an agent: its reward, its failure and its end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from lrl.environments import Agent
from lrl.environments.play import Play
from tests.environments.test_agent import ANSWER, CALL, DEADLINE_S, played

PROGRAM = """
import asyncio, json, os, sys
from tests.environments.agents import adds
row = json.load(sys.stdin)
print("the agent begins")
asyncio.run(adds(**row, base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]))
print(json.dumps({"reward": row["worth"]}))
"""


def test_a_program_is_an_agent_with_the_reward_in_its_last_line() -> None:
    agent = Agent(command=[sys.executable, "-c", PROGRAM])
    replies = played(agent, [CALL, ANSWER], worth=0.25)
    assert [one.done for one in replies] == [False, False, True]
    assert replies[-1].reward == 0.25


def test_a_program_that_fails_is_named_with_its_last_words() -> None:
    agent = Agent(command=[sys.executable, "-c", "import sys; sys.exit('no such tool')"])
    with pytest.raises(RuntimeError, match="ended with status 1: no such tool"):
        played(agent, [])


def test_a_program_ends_with_its_episode(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    async def begin_and_end() -> None:
        playing = Play(Agent(command=[sys.executable, "-c", program]), lambda reply: None)
        task = asyncio.ensure_future(playing.run("go", {}))
        while not (note.exists() and note.read_text()):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(begin_and_end(), DEADLINE_S))
    pid = int(note.read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
