"""Episodes in processes: what is broken costs the episode at fault, and no other.

Covers lrl/environments/base.py, play.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import psutil
import pytest

from lrl.environments import Agent, Environment
from lrl.environments.play import Reply
from lrl.environments.pool import EnvironmentPool, read_reply
from lrl.errors import BadAnswer, ConfigError, EpisodeError, WorkerLost
from lrl.types import Prompt
from tests.environments.agents import gives_up, runs
from tests.environments.here import Here
from tests.environments.test_agent_command import leaves, left
from tests.environments.worlds import AsksTwice, Odd, Unloadable
from tests.event_loop import LOOP
from tests.event_loop import run as run_on_loop
from tests.leftovers import wait_for_none
from tests.workers.jobs import PROMPT, pid_of, say

TIMEOUT_S = 2.0


def processes(environment: Environment = Odd(), **limits: Any) -> EnvironmentPool:  # noqa: B008
    usual = {"turn_timeout_s": TIMEOUT_S, "memory_gib": 1.0}
    return EnvironmentPool(environment, 1, **usual | limits)


def run(
    play: Callable[[EnvironmentPool], Coroutine[Any, Any, Any]],
    made: EnvironmentPool | None = None,
) -> Any:
    """Runs `play` with processes, and ends them."""
    made = made or processes()
    try:
        made.start(LOOP)
        return run_on_loop(play(made))
    finally:
        made.close()


def of_agents(agent: Callable[..., Any]) -> EnvironmentPool:
    return processes(Agent(agent), turn_timeout_s=60.0, memory_gib=None)


async def ending(work: Awaitable[Reply]) -> str:
    try:
        return str(await work)
    except WorkerLost as error:
        return f"{'lost by another' if error.by_other else 'lost'}: {error}"
    except EpisodeError as error:
        return str(error)


def test_many_episodes_of_one_process_know_nothing_of_one_another() -> None:
    async def play(made: EnvironmentPool) -> None:
        first, second = made.open(PROMPT), made.open(PROMPT)
        assert await first.begin() == await second.begin() == Reply("go 2", False, 0.0)
        await first.reply(say("a"))
        found = await asyncio.gather(first.reply(say("b")), second.reply(say("c")))
        assert found == [Reply("go|a|b", False, 0.25), Reply("go|c", False, 0.25)]
        assert pid_of(made.workers), "there is one"
        long = await first.reply(say("x" * 2_000_000))
        assert len(long.observation) > 2_000_000
        assert await second.reply(say("end")) == Reply("", True, 1.0)

    run(play)


BROKEN = {
    "raise": "environment_error: KeyError: 'the key' (",
    "exit": "environment_error: SystemExit: 3",
    "cancel": "environment_error: CancelledError",
    "deaf": "tool_timeout: no reply after 2 s",
    "thread": "tool_timeout: no reply after 2 s",
    "pair": "environment_error: ValueError: not enough values to unpack",
    "swapped": "environment_error: TypeError: reply gives (observation, done, reward)",
    "nan": "environment_error: TypeError: the reward is nan; give a finite number",
    "long": "environment_error: ValueError: the reply has 67,1",
    "set": "environment_error: TypeError: Object of type set is not JSON serializable",
    "number": "environment_error: TypeError: the observation is 7; give text, a list of token",
}
DEADLY = {
    "die": "environment_error: the worker ended with exit code 9",
    "crash": "environment_error: the worker was ended by signal 11",
    "leak": "environment_error: MemoryError; data.environment_memory_gib is 1",
    "hang": "tool_timeout: no reply after 2 s",
}


def test_an_agent_reaches_its_policy_past_a_proxy_and_ends_its_episode_before_its_turn_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else rank 0 would wait, and end the process with the episodes of all others."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # where nobody answers

    async def play(made: EnvironmentPool) -> str:
        episode = made.open(PROMPT)
        assert (await episode.begin()).observation == [{"role": "user", "content": "go"}]
        await asyncio.sleep(3.0)  # the policy writes, for longer than the agent waits
        return await ending(episode.reply(say("go")))

    assert run(play, of_agents(gives_up)) == str(Reply("", True, 0.5))


def test_each_failure_has_its_name_and_costs_no_other_episode() -> None:
    async def play(made: EnvironmentPool) -> dict[str, str]:
        bystander = made.open(PROMPT)
        await bystander.begin()
        episodes = {name: made.open(PROMPT) for name in BROKEN}
        await asyncio.gather(*(one.begin() for one in episodes.values()))
        found = await asyncio.gather(
            *(ending(one.reply(say(name))) for name, one in episodes.items())
        )
        assert await bystander.reply(say("a")) == Reply("go|a", False, 0.25)
        return dict(zip(episodes, found, strict=True))

    found = run(play)
    assert {name: found[name][: len(BROKEN[name])] for name in BROKEN} == BROKEN


def test_a_death_is_the_fault_of_whose_code_ran_and_the_others_can_be_played_again() -> None:
    async def play(made: EnvironmentPool) -> dict[str, str]:
        found = {}
        for name in DEADLY:
            guilty, idle, waiting = (made.open(PROMPT) for _ in range(3))
            for one in (guilty, idle, waiting):
                await one.begin()
            both = await asyncio.gather(
                ending(waiting.reply(say("wait"))), ending(guilty.reply(say(name)))
            )
            lost, why = both[0].split(": ", maxsplit=1)
            assert lost == "lost by another" and why in both[1]
            assert (await ending(idle.reply(say("a")))).startswith("lost by another: ")
            again = made.open(PROMPT)
            assert await again.begin() == Reply("go 2", False, 0.0)
            found[name] = both[1]
        assert made.workers.replaced == len(DEADLY)
        return found

    found = run(play)
    assert {name: found[name][: len(DEADLY[name])] for name in DEADLY} == DEADLY


def test_an_environment_that_asks_for_two_turns_at_once_fails() -> None:
    async def play() -> None:
        episode = Here(AsksTwice()).open(Prompt(id=0, token_ids=[], text="go"))
        assert (await episode.begin()).observation == "1"
        await episode.reply(say("one"))

    with pytest.raises(EpisodeError, match="await one after the other"):
        asyncio.run(play())


@pytest.mark.parametrize("ends", ["its episode", "close", "kill"])
def test_what_a_function_has_started_ends_with_its_episode_and_its_process(ends: str) -> None:
    """`test_agent_command.py` has all ways to leave something behind."""
    prompt = Prompt(id=0, token_ids=[1], text="go", columns={"program": leaves("a daemon")})

    async def play(made: EnvironmentPool) -> None:
        one = made.open(prompt)
        asks = asyncio.ensure_future(ending(one.begin()))
        while not left():
            await asyncio.sleep(0.02)
        if ends == "kill":
            os.kill(pid_of(made.workers), signal.SIGKILL)
            assert "SIGKILL" in await asks
        if ends == "its episode":
            one.close()
            asks.cancel()
            while left():
                await asyncio.sleep(0.02)
            assert psutil.pid_exists(pid_of(made.workers))

    run(play, of_agents(runs))
    wait_for_none(left, 20.0, "what the function has started")


def test_an_environment_that_fails_with_its_first_row_ends_a_run_before_a_server_starts() -> None:
    made = processes()

    def refuse(opening: Reply, reply: Reply) -> None:
        raise EpisodeError("environment_error", "no such token")

    with pytest.raises(
        ConfigError, match=r"the turn 'raise'.*KeyError: 'the key'.*row's columns: "
    ):
        made.start(LOOP, PROMPT, say("raise"), lambda *replies: None)
    with pytest.raises(ConfigError, match="no such token"):
        made.start(LOOP, PROMPT, say("a"), refuse)
    made.close()
    made = processes(Unloadable())
    with pytest.raises(ConfigError, match="cannot be loaded in a worker: FileNotFoundError"):
        made.start(LOOP, PROMPT, say("0"))


@pytest.mark.parametrize(
    "wrong",
    [{"observation": 7}, {"done": 1}, {"reward": float("nan")}, {"after": "0"}, {"tools": 0}],
)
def test_what_is_no_reply_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer):
        read_reply(Reply()._asdict() | wrong)
