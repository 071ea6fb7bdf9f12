"""An episode has the same replies and the same failures wherever it is played, and a member that is
lost costs none.

Covers lrl/environments/environment_server.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from lrl.environments import Environment
from lrl.environments import pool as pool_module
from lrl.environments.environment_server import EnvironmentServer
from lrl.environments.play import Reply
from lrl.environments.pool import EnvironmentPool, least_busy
from lrl.environments.remote_pool import EPISODES, RemoteEnvironment, RemoteEnvironments
from lrl.environments.worker import WorkerSpec
from lrl.errors import EnvironmentLost, NoEnvironments
from lrl.members.admission import WorkerAdmission
from lrl.members.registry import Kind, Status
from lrl.rollouts.episodes.episode import Episodes
from lrl.system.endpoint import Endpoint
from lrl.system.remote_workers import MemberAddress
from lrl.system.token_server import TokenServer
from lrl.types import Prompt, Rollout, Sampling
from tests.environments.broken import Unloadable
from tests.environments.test_processes import (
    BROKEN,
    DEADLY,
    PROMPT,
    TIMEOUT_S,
    ending,
    say,
)
from tests.environments.worlds import Odd
from tests.http_call import call
from tests.leftovers import lives, wait_for
from tests.members.served_run import served, spec_of
from tests.members.served_workers import START_S, TOKEN, ServedMembers
from tests.rollouts.episodes.test_episode import terms

ROOT = Path(__file__).parents[2]
EPISODES_AT_ONCE = 4


def pool_of(environment: Environment, workers: int = 0) -> EnvironmentPool:
    return EnvironmentPool(environment, workers, turn_timeout_s=TIMEOUT_S, memory_gib=1.0)


class Member:
    """A member in this process, with one process that plays."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.server = EnvironmentServer(pool._spec, 1, Endpoint(), TOKEN)
        self.location = self.server.start()

    def address(self, number: int = 0) -> MemberAddress:
        return MemberAddress(number, "far", 1, location=self.location, token=TOKEN)


@pytest.fixture(scope="module")
def member() -> Iterator[Member]:
    made = Member(pool_of(Odd()))
    yield made
    made.server.stop()


@pytest.fixture
def pool(member: Member) -> Iterator[EnvironmentPool]:
    """A pool whose episodes that member plays, all of them."""
    made = pool_of(Odd())
    far = made.remote.reach(member.address())
    asyncio.run(far.check())
    made.remote.add(far)
    yield made
    made.close()


@pytest.fixture
def members_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's own processes play only what no member can."""
    monkeypatch.setattr("lrl.environments.pool.least_busy", lambda players: players[0])


def test_each_failure_on_another_machine_has_its_name_and_costs_no_other_episode(
    pool: EnvironmentPool, member: Member
) -> None:
    async def play() -> dict[str, str]:
        found = {}
        for name in ("raise", "nan", "wait", *DEADLY):
            guilty, idle = pool.open(PROMPT), pool.open(PROMPT)
            assert await guilty.begin() == await idle.begin() == Reply("go 2", False, 0.0)
            found[name] = await ending(guilty.reply(say(name)))
            of_idle = await ending(idle.reply(say("a")))
            assert of_idle.startswith("lost by another: ") == (name in DEADLY), of_idle
            guilty.close()
            idle.close()
        last = pool.open(PROMPT)
        await last.begin()
        assert await last.reply(say("end")) == Reply("", True, 1.0)
        last.close()
        return found

    replaced = member.server.processes.replaced
    found = asyncio.run(play())
    expected = BROKEN | DEADLY
    for name, text in found.items():
        assert text.startswith(expected[name]) and text.endswith(" (environment 0 on far)"), text
    assert pool.replaced == member.server.processes.replaced == replaced + len(DEADLY)
    assert pool.answered_by == {"environment 0 on far": len(found) - len(DEADLY) + 1}


def test_an_episode_is_opened_where_the_fewest_are_for_each_process() -> None:
    class Model:
        episodes = 0

        def __init__(self, name: str, workers: int) -> None:
            self.name = name
            self.workers = workers

    players: list[Any] = [Model("far", 3), Model("here", 1)]
    for _ in range(8):
        least_busy(players).episodes += 1
    assert [player.episodes for player in players] == [6, 2]


def test_a_member_that_was_cut_off_begins_with_no_episode(
    pool: EnvironmentPool, member: Member
) -> None:
    async def play() -> str:
        one = pool.open(PROMPT)
        await one.begin()
        (before,) = pool.remote.ready
        before.lose("the network is gone")
        assert (await ending(one.reply(say("a")))) == "lost: the network is gone"
        again = pool.remote.reach(member.address())
        await again.check()
        pool.remote.add(again)
        assert not member.server._playing
        return await ending(again.ask(1, **say("a")._asdict()))

    assert asyncio.run(play()).startswith("lost: it has ended all its episodes")


def test_who_waits_for_a_reply_may_stop_waiting_and_the_episode_ends(
    pool: EnvironmentPool, member: Member
) -> None:
    async def play() -> None:
        one = pool.open(PROMPT)
        await one.begin()
        waiting = asyncio.create_task(one.reply(say("wait")))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        one.close()
        while member.server._playing:
            await asyncio.sleep(0.05)
        (far,) = pool.remote.ready
        assert far.idle

    asyncio.run(asyncio.wait_for(play(), 60))


def test_without_the_token_no_route_of_an_environment_answers(member: Member) -> None:
    routes = [("POST", f"{EPISODES}/1"), ("DELETE", f"{EPISODES}/1"), ("DELETE", EPISODES)]
    app = member.server._server
    assert app is not None and len(app._runner.app.router.routes()) == len(routes)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for method, route in routes:
            assert call(member.location.url, method, route, headers, b"{}")[0] == 401


def test_a_member_that_leaves_gets_no_new_episode_and_has_time_for_the_others(
    pool: EnvironmentPool, member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.remote.close()
    pool.remote._alone = False

    async def leave(finishes: bool) -> tuple[str, Status]:
        number = registry.claim(Kind.ENVIRONMENT)
        registry.register(Kind.ENVIRONMENT, number, member.location, "far", 1)
        admission = WorkerAdmission(Kind.ENVIRONMENT, pool.remote, registry, TOKEN)
        while not pool.remote.ready:
            await admission.poll()
            await asyncio.sleep(0.05)
        one = pool.open(PROMPT)
        await one.begin()
        registry.ask_to_leave(Kind.ENVIRONMENT, number)
        await admission.poll()
        assert not pool.remote.ready and registry.leaving(Kind.ENVIRONMENT) == [number]
        if finishes:
            assert (await one.reply(say("a"))).reward == 0.25
            one.close()
        else:
            monkeypatch.setattr(RemoteEnvironment, "leave_s", 0.0)
        await admission.poll()
        found = "" if finishes else await ending(one.reply(say("a")))
        return found, registry.view(Kind.ENVIRONMENT, number).status

    with served(spec_of()) as server:
        registry = server.registry
        assert asyncio.run(leave(True)) == ("", Status.LEFT)
        assert asyncio.run(leave(False)) == ("lost: it leaves the run", Status.LEFT)


def test_the_last_that_plays_must_stay(pool: EnvironmentPool) -> None:
    (far,) = pool.remote.ready
    assert "is the last one that plays" in pool.remote.leave_refusal(far)
    pool.remote._alone = False
    assert pool.remote.leave_refusal(far) == ""


def test_episodes_wait_for_a_member_and_at_the_limit_the_error_says_for_what(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_POLL_S", 0.01)
    pool = pool_of(Odd())

    async def play() -> Reply:
        waiting = asyncio.create_task(pool.open(PROMPT).begin())
        await asyncio.sleep(0.05)
        pool.remote.add(pool.remote.reach(member.address()))
        return await waiting

    assert asyncio.run(play()) == Reply("go 2", False, 0.0)
    pool.remote.remove(0, "its machine is gone")
    monkeypatch.setattr(pool_module, "OUTAGE_S", 0.0)
    with pytest.raises(NoEnvironments, match=r"workers is 0, .*because: environment 0 .* is gone"):
        asyncio.run(pool.open(PROMPT).begin())
    pool.close()
    with pytest.raises(EnvironmentLost, match="the run has ended"):
        asyncio.run(pool.open(PROMPT).begin())


class Answers:
    """A server in a member's place, which answers a message as it is told, or not at all."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.server = TokenServer(Endpoint(), TOKEN, [web.post(EPISODES + "/1", self.reply)])
        self.pool = RemoteEnvironments(WorkerSpec(b"", 0.01, None, start_timeout_s=0.0), alone=True)
        location = self.server.location()
        address = MemberAddress(0, "far", 1, location=location, token=TOKEN)
        self.member = self.pool.reach(address)
        self.pool.add(self.member)

    async def reply(self, request: web.Request) -> web.Response:
        await asyncio.sleep(600.0 if self.answer is None else 0.0)
        return web.json_response(self.answer)

    def ask(self) -> Reply:
        try:
            return asyncio.run(self.member.ask(1, **say("a")._asdict()))
        finally:
            self.server.close()


def test_a_member_that_never_answers_is_given_up_at_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lrl.environments.remote_pool.CHECK_S", 0.1)
    silent = Answers()
    with pytest.raises(EnvironmentLost, match="no answer from it in"):
        silent.ask()
    assert silent.pool.ready == []


@pytest.mark.parametrize(
    "answer",
    [
        "no object",
        {"answer": {"observation": "", "done": False, "reward": 0.0}},
        *(
            {"answer": answer, "replaced": 0}
            for answer in (
                None,
                {"observation": 7, "done": False, "reward": 0.0},
                {"observation": "", "done": 1, "reward": 0.0},
                {"observation": "", "done": True, "reward": float("nan")},
                {"failed": ["bad_day", "it rains"]},
            )
        ),
    ],
)
def test_a_member_that_answers_what_none_does_is_lost(answer: object) -> None:
    made = Answers(answer)
    with pytest.raises(EnvironmentLost, match="no answer to a turn|is no reply"):
        made.ask()
    assert made.pool.ready == []


class Writes:
    """Writes three turns for each rollout, the same ones after the same tokens; calls `then` before
    each request."""

    def __init__(self, then: Callable[[int], None] = lambda number: None) -> None:
        self.then = then
        self.requests = 0

    async def generate(
        self, prompt: Prompt, rollouts: Sequence[Rollout], sampling: Sampling, **how: Any
    ) -> None:
        self.requests += 1
        await asyncio.to_thread(self.then, self.requests)
        for number, rollout in enumerate(rollouts):
            rollout.token_ids.extend([len(prompt.token_ids) + number, 2])
            rollout.logprobs.extend([-0.5, -0.5])
            rollout.versions.extend([0, 0])
            rollout.finish_reason = "stop"
        how["verified"]()


def played(pool: EnvironmentPool, writes: Writes) -> list[tuple[list[int], list[float]]]:
    """Plays a group of episodes to their ends; tokens and rewards of each."""
    rollouts = [Rollout() for _ in range(EPISODES_AT_ONCE)]
    episodes = Episodes(writes.generate, pool, **terms(max_turns=3))
    sampling = Sampling(n=len(rollouts), max_tokens=400, stop_tokens=(2,))
    asyncio.run(episodes.generate(PROMPT, rollouts, sampling, priority=0))
    assert [rollout.finish_reason for rollout in rollouts] == ["turns"] * len(rollouts)
    return [(rollout.token_ids, rollout.turn_rewards) for rollout in rollouts]


def test_a_member_that_is_killed_in_mid_episode_costs_none_and_its_processes_end_with_it(
    tmp_path: Path, members_first: None
) -> None:
    alone = pool_of(Odd(), workers=1)
    expected = played(alone, Writes())
    alone.close()
    pool, killed = pool_of(Odd(), workers=1), threading.Event()
    made = ServedMembers(Kind.ENVIRONMENT, pool.remote, tmp_path, Endpoint())
    try:
        stranger = made.start(path=ROOT, token="another-token-of-a-run")
        far = made.start(path=ROOT)
        made.joined(1)
        own = psutil.Process(far.pid).children(recursive=True)

        def then(number: int) -> None:
            if number == 2:
                first_turns = f"{EPISODES_AT_ONCE} replies"
                wait_for(lambda: pool.answered_by.total() == EPISODES_AT_ONCE, START_S, first_turns)
                os.kill(far.pid, signal.SIGKILL)
                killed.set()
            elif number > 2:
                assert killed.wait(START_S)

        assert played(pool, Writes(then)) == expected
        here = pool.answered_by.pop("rank 0")
        ((name, there),) = pool.answered_by.items()
        assert name.startswith("environment 0 on ") and there == EPISODES_AT_ONCE
        assert here == 3 * EPISODES_AT_ONCE, "the first turns are answered again"
        assert pool.counts == Counter(replayed=EPISODES_AT_ONCE) and pool.replaced == 0
        wait_for(lambda: not any(map(lives, own)), 60.0, "the end of the member's processes")
        assert own

        def lost() -> bool:
            return made.registry.view(Kind.ENVIRONMENT, 0).status is Status.LOST

        wait_for(lost, 30.0, "the loss of the member")
        text, _ = stranger.communicate(timeout=START_S)
        assert stranger.returncode == 2 and "only with the token of that run" in text
    finally:
        made.close()
        pool.close()


def test_a_member_that_cannot_play_says_so_on_both_ends_and_gets_no_episode(
    tmp_path: Path,
) -> None:
    pool = pool_of(Unloadable())
    made = ServedMembers(Kind.ENVIRONMENT, pool.remote, tmp_path, Endpoint())
    try:
        text, _ = made.start(path=ROOT).communicate(timeout=START_S)
        for said in (text, made.refusal):
            assert "data.environment cannot be loaded in its process: RuntimeError: no scr" in said
            assert "must be on this machine" in said
        other = pool_of(Odd())
        other.start(PROMPT, say("raise"), lambda *reply: None)
        pool.remote.spec = other.remote.spec
        pool.remote.trial = other.remote.trial
        far = made.start(path=ROOT)
        text, _ = far.communicate(timeout=START_S)
        assert far.returncode == 1 and "the run has not admitted it: data.environment was" in text
        assert "with prompt 3 and the turn 'raise'" in made.refusal
        assert "environment_error: KeyError: 'the key'" in made.refusal
        assert "(environment 1 on " in made.refusal and pool.remote.ready == []
    finally:
        made.close()
        pool.close()
