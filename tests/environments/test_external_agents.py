"""Agents that lrl does not start, through the run's real server: nobody without a key takes or plays
an episode, each episode is played once or counted, and none waits for ever. A stand-in writes the
turns at the pool's edge.
"""

from __future__ import annotations

import asyncio
import json
import math
import stat
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lrl.environments import Agent, external_agents
from lrl.environments.external_agents import ExternalAgents
from lrl.errors import NoEnvironments
from lrl.system.endpoint import Endpoint
from lrl.types import Rollout
from tests import made
from tests.certificates import self_signed
from tests.environments.agents import ask
from tests.environments.here import of_run
from tests.environments.test_agent import DEADLINE_S
from tests.environments.test_lineages import CallingSampler, play_to_the_end

USER = {"role": "user", "content": "go"}
KEY = "k" * 32


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRL_AGENT_KEY", KEY)


class Outside:
    """A program that has the run's address and a key."""

    def __init__(
        self, agents: ExternalAgents, session: aiohttp.ClientSession, folder: Path
    ) -> None:
        self.agents = agents
        self.ask = partial(ask, session)
        file = folder / "agents" / "address.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        self.url, self.key = json.loads(file.read_text()).values()

    async def take(self, **headers: str) -> dict[str, Any]:
        while True:
            status, found = await self.ask(f"{self.url}/episodes", self.key, **headers)
            if status == 200:
                return dict(found)
            assert status == 429, found
            await asyncio.sleep(0.01)

    async def turn(self, episode: dict[str, Any], *messages: Any) -> tuple[int, Any]:
        url = f"{episode['base_url']}/chat/completions"
        status, found = await self.ask(url, episode["api_key"], {"messages": messages or [USER]})
        return status, found["choices"][0]["message"] if status == 200 else found["error"]

    async def end(self, episode: dict[str, Any], body: Any) -> tuple[int, Any]:
        return await self.ask(f"{episode['base_url']}/end", episode["api_key"], body)


Play = Callable[..., ExternalAgents]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def played(
        work: Callable[[Outside], Awaitable[None]],
        rollouts: list[Rollout],
        endpoint: Endpoint = Endpoint(),  # noqa: B008
        **limits: Any,
    ) -> ExternalAgents:
        """Plays rollouts to their ends beside `work`, which is done outside, and scores them."""
        played_by = of_run(Agent(port=0), max_turn_tokens=200, **limits)
        agents = played_by.external
        assert agents is not None
        group = made.group(0, *rollouts, prompt=[], text="2+3=", columns={"answer": "5"})

        async def outside() -> None:
            tls = aiohttp.TCPConnector(ssl=endpoint.location(0).context() or True)
            async with aiohttp.ClientSession(connector=tls) as session:
                await work(Outside(agents, session, tmp_path))

        async def run() -> None:
            assert "from the first step on" in await agents.listen(endpoint, tmp_path)
            try:
                await play_to_the_end(played_by, CallingSampler(), group, outside())
            finally:
                agents.close()

        asyncio.run(run())
        assert not agents.playing and not (tmp_path / "agents").exists()
        return agents

    return played


def test_an_agent_that_is_silent_before_its_first_turn_costs_nothing_but_a_count(
    play: Play,
) -> None:
    rollout = Rollout()

    async def work(outside: Outside) -> None:
        outside.agents.turn_timeout_s = 0.1
        silent = await outside.take()
        while not outside.agents.counts["restarted"]:
            await asyncio.sleep(0.01)
        outside.agents.turn_timeout_s = DEADLINE_S
        other = await outside.take()
        assert (await outside.turn(silent))[0] == 410
        assert (await outside.turn(other))[0] == 200
        await outside.end(other, {"reward": 1})

    agents = play(work, [rollout])
    assert agents.counts == {"restarted": 1} and rollout.reward == 1


def test_an_agent_that_is_silent_after_a_turn_is_a_counted_time_out(play: Play) -> None:
    rollout = Rollout()

    async def work(outside: Outside) -> None:
        episode = await outside.take()
        outside.agents.turn_timeout_s = 0.2
        assert (await outside.turn(episode))[0] == 200
        while not rollout.finished:
            await asyncio.sleep(0.01)
        status, error = await outside.turn(episode, {"role": "user", "content": "late"})
        assert status == 410 and "the episode has ended" in error["message"]
        assert (await outside.end(episode, {"reward": 1}))[0] == 410

    play(work, [rollout])
    assert rollout.failure == "tool_timeout: the agent has asked for nothing in 0.2 s"
    assert rollout.reward is None


def test_a_limit_ends_an_episode_for_its_agent_at_once(play: Play) -> None:
    rollouts = [Rollout(), Rollout()]

    async def work(outside: Outside) -> None:
        for _ in rollouts:
            episode = await outside.take()
            _, answer = await outside.turn(episode)
            status, error = await outside.turn(episode, USER, answer, USER)
            assert status == 410 and "the episode has ended" in error["message"]

    play(work, rollouts, max_turns=1)
    assert [rollout.finish_reason for rollout in rollouts] == ["turns", "turns"]
    assert [rollout.reward for rollout in rollouts] == [0, 0], "what the policy causes is scored"


def test_an_end_is_a_reward_or_an_error_and_comes_once(play: Play) -> None:
    rollouts = [Rollout(), Rollout()]

    async def work(outside: Outside) -> None:
        episode = await outside.take()
        status, found = await outside.end(episode, {"reward": 1})
        assert status == 400 and "has not written a turn yet" in found["error"]["message"]
        await outside.turn(episode)
        for body in ("{", [], {"score": 1}, {"reward": math.nan}, "[" * 5000, {"error": 7}):
            assert (await outside.end(episode, body))[0] == 400, body
        assert await outside.end(episode, {}) == (200, {})
        assert (await outside.end(episode, {"reward": 1}))[0] == 410
        assert (await outside.turn(episode, USER))[0] == 410
        broken = await outside.take()
        assert await outside.end(broken, {"error": "no browser" + "." * 1000}) == (200, {})

    play(work, rollouts)
    assert [rollout.reward for rollout in rollouts] == [0, None]
    assert rollouts[1].failure.startswith("environment_error: the agent has said: no browser...")
    assert len(rollouts[1].failure) < 600


def test_nobody_without_the_key_takes_reads_samples_or_ends(play: Play) -> None:
    rollouts = [Rollout() for _ in range(3)]
    routes = (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/policy"),
        ("POST", "/v1/end"),
    )

    async def work(outside: Outside) -> None:
        mine, other, ended = [await outside.take() for _ in rollouts]
        await outside.turn(ended)
        await outside.end(ended, {})
        wrong = {
            "no key": (mine, None),
            "an empty one": (mine, ""),
            "the run's for agents": (mine, KEY),
            "of another episode": (mine, other["api_key"]),
            "at another address": (other, mine["api_key"]),
            "of an ended episode": (mine, ended["api_key"]),
            "a longer one": (mine, f"{mine['api_key']}0"),
            "letters that no header has": (mine, "ä"),
        }
        body = {"messages": [USER], "reward": 1}
        for why, (episode, key) in wrong.items():
            for method, route in routes:
                url = f"{outside.url}/{episode['api_key']}{route}"
                status, found = await outside.ask(url, key, body, method)
                assert status == 401 and "choices" not in found, (why, route)
            if key != KEY:
                status, found = await outside.ask(f"{outside.url}/episodes", key)
                assert status == 401 and "not the run's key" in found["error"]["message"], why
        for method, route in routes:
            for gone in ("0" * 32, ended["api_key"]):
                found = await outside.ask(f"{outside.url}/{gone}{route}", gone, body, method)
                assert found[0] == 410
        for method, path in (
            ("GET", "/episodes"),
            ("POST", "/run"),
            ("POST", f"/{mine['api_key']}/v1/completions"),
            ("DELETE", f"/{mine['api_key']}/v1/end"),
            ("DELETE", f"/{mine['api_key']}/v1/models"),
            ("GET", f"/{mine['api_key']}/v1/chat/completions"),
        ):
            found = await outside.ask(f"{outside.url}{path}", KEY, method=method)
            assert found[0] in (404, 405)
        for episode in (mine, other):
            assert (await outside.turn(episode))[0] == 200
            await outside.end(episode, {"reward": 0.5})

    play(work, rollouts)
    assert sorted(rollout.reward or 0 for rollout in rollouts) == [0, 0.5, 0.5]
    assert [len(rollout.turns) for rollout in rollouts] == [1, 1, 1]


@pytest.fixture
def short_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_agents, "OUTAGE_S", 0.5)
    monkeypatch.setattr(external_agents, "LOG_EVERY_S", 0.05)


def test_a_run_that_no_agent_serves_ends(
    play: Play, short_outage: None, caplog: pytest.LogCaptureFixture
) -> None:

    async def nobody(outside: Outside) -> None:
        await asyncio.sleep(DEADLINE_S)

    with pytest.raises(NoEnvironments, match=r"No agent has asked for an episode .*Agent.port"):
        play(nobody, [Rollout()])
    assert "1 episodes wait, for 0.5 s" in caplog.text


def test_an_agent_that_plays_is_no_outage(play: Play, short_outage: None) -> None:
    rollouts = [Rollout(), Rollout()]

    async def work(outside: Outside) -> None:
        episode = await outside.take()
        await outside.turn(episode)
        await asyncio.sleep(1.5)  # the other one waits
        await outside.end(episode, {})
        other = await outside.take()
        await outside.turn(other)
        await outside.end(other, {})

    play(work, rollouts)


def test_a_tunnel_and_tls_have_their_part_in_the_address_of_an_episode(
    play: Play, tmp_path: Path
) -> None:
    rollout = Rollout()

    async def work(outside: Outside) -> None:
        assert outside.url.startswith("https://127.0.0.1:")
        episode = await outside.take(Host="gpu7:80")
        assert episode["base_url"] == f"https://gpu7:80/{episode['api_key']}/v1"
        episode["base_url"] = episode["base_url"].replace("https://gpu7:80", outside.url)
        assert (await outside.turn(episode))[0] == 200
        await outside.end(episode, {"reward": 1})

    cert, tls_key = self_signed(tmp_path)
    endpoint = Endpoint(tls_cert=cert, tls_key=tls_key)
    play(work, [rollout], endpoint=endpoint)
    assert rollout.reward == 1
