"""A program as an agent: its reward, its failure and its end.

Covers lrl/system/processes.py.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid

import psutil
import pytest

from lrl.environments import Agent
from lrl.errors import EpisodeError
from lrl.types import Prompt
from tests.environments.here import Here
from tests.environments.test_agent import ANSWER, CALL, DEADLINE_S, played
from tests.leftovers import every_process, wait_for, wait_for_none, words

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
    with pytest.raises(EpisodeError, match="ended with status 1: no such tool"):
        played(agent, [])
    with pytest.raises(EpisodeError, match="no-such-agent cannot be started"):
        played(Agent(command=["no-such-agent"]), [])


SLEEP = f"import time; time.sleep(600) or {uuid.uuid4().hex!r}"
LEAVING = {
    "a session": "subprocess.Popen(WORDS, start_new_session=True)",
    "a group": "subprocess.Popen(WORDS, process_group=0)",
    "a job of a shell": "subprocess.run(['bash', '-c', 'set -m; \"$@\" & disown', 'x', *WORDS])",
    "nohup and setsid": "subprocess.run(['sh', '-c', 'nohup setsid \"$@\" >/dev/null 2>&1 &', 'x', *WORDS])",
    "a daemon": "os.fork() or (os.setsid(), os.fork() or os.execv(WORDS[0], WORDS), os._exit(0))",
    "without its environment": "subprocess.Popen(WORDS, env={}, cwd='/', start_new_session=True)",
    "deaf": (
        "subprocess.Popen(['sh', '-c', 'trap : TERM HUP INT; \"$@\"', 'x', *WORDS],"
        " start_new_session=True)"
    ),
}
"""How a program leaves a child behind that has its outputs open, if it does not close them."""


def leaves(way: str, *then: str) -> str:
    begin = f"import os, subprocess, time\nWORDS = {[sys.executable, '-c', SLEEP]}"
    return "\n".join([begin, LEAVING[way], *then])


def left() -> list[psutil.Process]:
    return [one for one in every_process() if words(one)[-1:] == [SLEEP]]


@pytest.mark.parametrize("way", LEAVING)
def test_what_a_program_leaves_behind_ends_with_it_and_costs_no_reward(way: str) -> None:
    program = leaves(way, "print('{\"reward\": 0.5}')")
    replies = played(Agent(command=[sys.executable, "-c", program]), [])
    assert replies[-1].reward == 0.5
    assert left() == []


@pytest.mark.parametrize("way", ["a daemon", "deaf"])
def test_what_a_program_has_started_ends_with_its_episode(way: str) -> None:
    async def begin_and_end() -> None:
        command = [sys.executable, "-c", leaves(way, "time.sleep(600)")]
        episode = Here(Agent(command=command)).open(Prompt(id=0, token_ids=[], text="go"))
        while not left():
            await asyncio.sleep(0.05)
        episode.close()
        with pytest.raises(asyncio.CancelledError):
            await episode.task

    asyncio.run(asyncio.wait_for(begin_and_end(), DEADLINE_S))
    assert left() == []


def test_what_a_program_has_started_ends_with_a_killed_worker() -> None:
    command = [sys.executable, "-c", leaves("a daemon", "time.sleep(600)")]
    script = (
        "import asyncio\nfrom lrl.environments.agent import run_command\n"
        f"asyncio.run(run_command({command!r}, {{}}, {{}}))"
    )
    worker = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(left, what="the child of the program")
    finally:
        worker.kill()
        worker.wait()
    wait_for_none(left, 60.0, "what the program has started")


def test_a_script_that_ends_its_group_has_its_reward() -> None:
    script = """trap 'trap "" TERM; kill 0' EXIT; sleep 600 & echo '{"reward": 0.5}'"""
    assert played(Agent(command=["bash", "-c", script]), [])[-1].reward == 0.5
