"""Agents that lrl does not start, through the run's real server: nobody without a key takes or plays
an episode, each episode is played once or counted, and none waits for ever. A stand-in writes the
turns at the pool's edge.
"""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lrl.environments import Agent, external_agents
from lrl.environments.external_agents import ExternalAgents
from lrl.errors import ConfigError, NoEnvironments
from lrl.rollouts.controller import score
from lrl.rollouts.episodes.episode import Episodes
from lrl.system.endpoint import Endpoint
from lrl.types import Prompt, Rollout, Sampling
from tests.certificates import self_signed
from tests.chat_templates import CHATML
from tests.environments.elsewhere import is_served
from tests.environments.here import of_run
from tests.environments.test_lineages import no_rewards
from tests.rollouts.episodes.test_branches import Sampler
from tests.rollouts.episodes.test_observations import policy_of

USER = {"role": "user", "content": "go"}
KEY = "k" * 32
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRL_AGENT_KEY", KEY)


class Outside:
    """A program that has the run's address and a key."""

    def __init__(
        self, agents: ExternalAgents, session: aiohttp.ClientSession, folder: Path
    ) -> None:
        self.agents = agents
        self.session = session
        file = folder / "agents" / "address.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        self.address = json.loads(file.read_text())

    async def ask(
        self, method: str, url: str, key: str | None, body: Any = None, **headers: str
    ) -> tuple[int, Any, Any]:
        if key is not None:
            headers |= {"Authorization": f"Bearer {key}"}
        data = body if isinstance(body, str | bytes) else json.dumps(body)
        async with self.session.request(method, url, data=data, headers=headers) as answer:
            has_json = answer.content_type == "application/json"
            return answer.status, answer.headers, await answer.json() if has_json else None

    async def take(self, **headers: str) -> dict[str, Any]:
        while True:
            url = f"{self.address['url']}/episodes"
            status, headers_of, found = await self.ask("POST", url, self.address["key"], **headers)
            if status == 200:
                return dict(found)
            assert (status, headers_of["Retry-After"]) == (429, "1"), found
            await asyncio.sleep(0.01)

    async def turn(self, episode: dict[str, Any], *messages: Any) -> tuple[int, Any]:
        url = f"{episode['base_url']}/chat/completions"
        body = {"messages": messages or [USER]}
        status, _, found = await self.ask("POST", url, episode["api_key"], body)
        return status, found["choices"][0]["message"] if status == 200 else found["error"]

    async def end(self, episode: dict[str, Any], **how: Any) -> tuple[int, Any]:
        status, _, found = await self.ask(
            "POST", f"{episode['base_url']}/end", episode["api_key"], how
        )
        return status, found


Work = Callable[[Outside], Awaitable[None]]
Play = Callable[..., ExternalAgents]


def played(
    folder: Path,
    work: Work,
    rollouts: list[Rollout],
    *,
    turn_timeout_s: float = DEADLINE_S,
    later_timeout_s: float | None = None,
    endpoint: Endpoint = Endpoint(),  # noqa: B008
    max_turns: int = 8,
) -> ExternalAgents:
    """Plays rollouts to their ends beside `work`, which is done outside, and scores them. From the
    first turn on, `later_timeout_s` is in the place of `turn_timeout_s`."""
    policy = policy_of(CHATML)
    sampling = Sampling(n=len(rollouts), max_tokens=2000, stop_tokens=tuple(sorted(policy.ends)))
    prompt = Prompt(id=0, token_ids=[], text="2+3=", columns={"answer": "5"})
    settings: Any = {"turn_timeout_s": turn_timeout_s, "episode_timeout_s": DEADLINE_S}
    played_by = of_run(Agent(port=0), max_turns=max_turns, max_turn_tokens=200, **settings)
    agents = played_by.external
    assert agents is not None
    sampler = Sampler(len(policy.tokenizer))

    async def write(*words: Any, **how: Any) -> None:
        agents.turn_timeout_s = later_timeout_s or turn_timeout_s
        await sampler.write(*words, **how)

    episodes = Episodes(played_by, write, policy)

    async def run() -> None:
        assert "from the first step on" in await agents.listen(endpoint, folder)
        tls = aiohttp.TCPConnector(ssl=endpoint.location(0).context() or True)
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(connector=tls) as session:
            playing = asyncio.ensure_future(
                episodes.generate(prompt, rollouts, sampling, priority=0)
            )
            while not is_served(folder / "agents" / "address.json"):
                await asyncio.sleep(0.01)
            working = asyncio.ensure_future(work(Outside(agents, session, folder)))
            try:
                await asyncio.gather(playing, working)
            finally:
                for task in (playing, working):
                    task.cancel()
                agents.close()
        await score(prompt, rollouts, decode=policy.decode, rewards=no_rewards)
        assert not agents.playing

    asyncio.run(run())
    assert not (folder / "agents").exists()
    return agents


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return partial(played, tmp_path)


def test_an_agent_that_is_silent_before_its_first_turn_costs_nothing_but_a_count(
    play: Play,
) -> None:
    rollout = Rollout()

    async def work(outside: Outside) -> None:
        silent = await outside.take()
        while not outside.agents.counts["restarted"]:
            await asyncio.sleep(0.01)
        outside.agents.turn_timeout_s = DEADLINE_S
        other = await outside.take()
        assert (await outside.turn(silent))[0] == 410
        assert (await outside.turn(other))[0] == 200
        await outside.end(other, reward=1)

    agents = play(work, [rollout], turn_timeout_s=0.1, later_timeout_s=DEADLINE_S)
    assert agents.counts == {"restarted": 1} and rollout.reward == 1


def test_an_agent_that_is_silent_after_a_turn_is_a_counted_time_out(play: Play) -> None:
    rollout = Rollout()

    async def work(outside: Outside) -> None:
        episode = await outside.take()
        assert (await outside.turn(episode))[0] == 200
        while not rollout.finished:
            await asyncio.sleep(0.01)
        status, error = await outside.turn(episode, {"role": "user", "content": "late"})
        assert status == 410 and "the episode has ended" in error["message"]
        assert (await outside.end(episode, reward=1))[0] == 410

    play(work, [rollout], later_timeout_s=0.2)
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
        status, found = await outside.end(episode, reward=1)
        assert status == 400 and "has not written a turn yet" in found["error"]["message"]
        await outside.turn(episode)
        url = f"{episode['base_url']}/end"
        for body in ("{", "[]", '{"score": 1}', '{"reward": NaN}', "[" * 5000, '{"error": 7}'):
            assert (await outside.ask("POST", url, episode["api_key"], body))[0] == 400, body
        assert await outside.end(episode) == (200, {})
        assert (await outside.end(episode, reward=1))[0] == 410
        assert (await outside.turn(episode, USER))[0] == 410
        broken = await outside.take()
        assert await outside.end(broken, error="no browser" + "." * 1000) == (200, {})

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
        run = outside.address["url"]
        mine, other, ended = [await outside.take() for _ in rollouts]
        await outside.turn(ended)
        await outside.end(ended)
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
                url = f"{run}/{episode['api_key']}{route}"
                status, _, found = await outside.ask(method, url, key, body)
                assert status == 401 and "choices" not in found, (why, route)
            if key != KEY:
                status, _, found = await outside.ask("POST", f"{run}/episodes", key)
                assert status == 401 and found["error"]["message"] == (
                    "the API key is not the run's key for agents"
                ), why
        for method, route in routes:
            for gone in ("0" * 32, ended["api_key"]):
                url = f"{run}/{gone}{route}"
                assert (await outside.ask(method, url, gone, body))[0] == 410
            # No word for a password, no key in another place.
            url = f"{run}/{mine['api_key']}{route}"
            key = mine["api_key"]
            password = {"Authorization": f"Basic {key}"}
            for headers in ({"Authorization": key}, password, {"X-API-Key": key}):
                assert (await outside.ask(method, url, None, body, **headers))[0] == 401
        for method, path in (
            ("GET", "/episodes"),
            ("POST", "/run"),
            ("POST", f"/{mine['api_key']}/v1/completions"),
            ("DELETE", f"/{mine['api_key']}/v1/end"),
            ("DELETE", f"/{mine['api_key']}/v1/models"),
            ("GET", f"/{mine['api_key']}/v1/chat/completions"),
        ):
            assert (await outside.ask(method, f"{run}{path}", KEY))[0] in (404, 405)
        for episode in (mine, other):
            assert (await outside.turn(episode))[0] == 200
            await outside.end(episode, reward=0.5)

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
        await outside.end(episode)
        other = await outside.take()
        await outside.turn(other)
        await outside.end(other)

    play(work, rollouts)


def test_a_tunnel_and_tls_have_their_part_in_the_address_of_an_episode(
    play: Play, tmp_path: Path
) -> None:
    rollout = Rollout()

    async def work(outside: Outside) -> None:
        assert outside.address["url"].startswith("https://127.0.0.1:")
        episode = await outside.take(Host="gpu7:80")
        assert episode["base_url"] == f"https://gpu7:80/{episode['api_key']}/v1"
        episode["base_url"] = episode["base_url"].replace("https://gpu7:80", outside.address["url"])
        assert (await outside.turn(episode))[0] == 200
        await outside.end(episode, reward=1)

    cert, tls_key = self_signed(tmp_path)
    endpoint = Endpoint(tls_cert=cert, tls_key=tls_key)
    play(work, [rollout], endpoint=endpoint)
    assert rollout.reward == 1


def test_two_runs_have_two_keys_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ExternalAgents(Agent(port=0), 1.0)._key == KEY, "it leaves the environment"
    first, second = (ExternalAgents(Agent(port=0), 1.0)._key for _ in range(2))
    assert first != second and KEY not in (first, second) and len(first) > 40
    monkeypatch.setenv("LRL_AGENT_KEY", "1234")
    with pytest.raises(ConfigError, match="LRL_AGENT_KEY has 4"):
        ExternalAgents(Agent(port=0), 1.0)
