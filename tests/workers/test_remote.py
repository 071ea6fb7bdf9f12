"""A job has one outcome, and the same failures, on every machine, and a member that is lost costs
none: real members, real deaths.

Covers lrl/workers/pool.py.
"""

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from aiohttp import web

from lrl.errors import BadAnswer, NoEnvironments, WorkerLost
from lrl.generators.settings import ServerSettings
from lrl.members.registry import JoinSpec, Kind, Registry, RegistryServer, Status
from lrl.members.run_members import WorkerAdmission, poll_forever
from lrl.rewards import RewardPool
from lrl.system.auth import TokenServer
from lrl.system.endpoint import Endpoint, Location
from lrl.workers.pool import Members, WorkerPool, least_busy
from lrl.workers.process import WorkerSpec
from lrl.workers.remote import CALLS, RemoteWorkers
from tests import network_namespace
from tests.event_loop import LOOP, run
from tests.http_call import call
from tests.leftovers import lives, wait_for
from tests.made import rollout
from tests.workers.jobs import ORDERS, PROMPT, REWARDS, Episodes, Groups, done, odd_rewards, say

ROOT = Path(__file__).parents[2]
TOKEN = "the-token-of-this-run"
START_S = 120.0
PATH = os.pathsep.join([str(ROOT), str(REWARDS)])


class ServedMembers(ExitStack):
    """Workers of jobs on this machine, a server at which members join them, as at rank 0, and real
    members."""

    def __init__(self, folder, *jobs, endpoint=Endpoint()):  # noqa: B008
        super().__init__()
        self.folder = folder
        for each in jobs:
            self.callback(each.pool.close)
            each.pool.start(LOOP)
        self.members = Members(*(each.pool.workers for each in jobs))
        settings = asdict(ServerSettings(**vars(endpoint)))
        terms = self.members.terms()
        spec = JoinSpec("base", settings, "pull", "ab12", on_cpu=True, generators=0, terms=terms)
        self.registry = Registry(spec)
        self.server = RegistryServer(self.registry, endpoint, TOKEN)
        admission = WorkerAdmission(self.members, self.registry, TOKEN)
        polls = LOOP.submit(poll_forever(admission.poll))
        for end in (self.server.close, polls.cancel, self.registry.end):
            self.callback(end)

    def start(self, *, path=PATH, prefix=(), without=""):
        """Starts `lrl join` with one worker; its machine lacks the variable `without`."""
        lrl = str(Path(sys.executable).with_name("lrl"))
        own = ["join", self.server.location().url, "--kind", "worker", "--workers", "1"]
        environment = {name: value for name, value in os.environ.items() if name != without}
        process = subprocess.Popen(
            [*prefix, lrl, *own],
            env=environment | {"LRL_TOKEN": TOKEN, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )
        self.callback(process.wait, 60)
        self.callback(process.kill)
        return process

    def joined(self, count):
        wait_for(lambda: len(self.members.ready) == count, START_S, f"{count} workers")

    def becomes(self, number, status):
        view = self.registry.view
        wait_for(lambda: view(Kind.WORKER, number).status is status, START_S, f"a member {status}")

    @property
    def refusal(self):
        return "".join(each.why for each in self.registry.members(Kind.WORKER))


@pytest.fixture
def members_first(monkeypatch):
    monkeypatch.setattr("lrl.workers.pool.least_busy", lambda machines, pool: machines[0])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    jobs = [Groups(), Episodes()]
    with ServedMembers(tmp_path_factory.mktemp("member"), *jobs) as made:
        made.start()
        made.joined(1)
        yield made, jobs


def doing(jobs, *texts):
    """Scores a group beside what the test does; the result waits for its rewards."""
    rollouts = [rollout(text=text) for text in texts]
    score = LOOP.submit(jobs.pool.score(PROMPT, rollouts))

    def rewards():
        score.result(START_S)
        return [rollout.reward for rollout in rollouts]

    return rewards


def gone(processes):
    assert processes
    wait_for(lambda: not any(map(lives, processes)), 60.0, "the end of the member's processes")


ENDS = {
    "crash": "the worker was ended by signal 11",
    "leak": "MemoryError; data.",
    "hang": " after 1.5 s",
}


def test_one_member_does_what_the_run_has_with_the_failures_of_rank_0(shared, members_first):
    made, all_jobs = shared
    (member,) = made.members.ready
    for jobs in all_jobs:
        here = type(jobs)()
        here.pool.start(LOOP)
        try:
            on_rank_0 = done(here, *ORDERS)
        finally:
            here.pool.close()
        for order, words in ENDS.items():
            assert words in dict(zip(ORDERS, on_rank_0, strict=True))[order]
        suffix = f" ({member.name})"
        there = done(jobs, *ORDERS)
        assert there == [why and why + suffix for why in on_rank_0]
        assert jobs.replaced == here.replaced >= len(ORDERS) - 1
    groups, episodes = all_jobs
    assert groups.pool.scored_by == episodes.pool.answered_by == {member.name: 1}
    assert member.name.startswith("worker 0 on ") and groups.pool.counts["moved"] == 0
    assert member.idle


def test_a_member_that_is_killed_in_mid_job_costs_none_and_its_processes_end_with_it(
    tmp_path, members_first
):
    groups, episodes, begun = Groups(timeout_s=60.0), Episodes(timeout_s=60.0), tmp_path / "begun"
    with ServedMembers(tmp_path, groups, episodes) as made:
        member = made.start()
        made.joined(1)
        own = psutil.Process(member.pid).children(recursive=True)
        rewards = doing(groups, "give 3", f"once {begun} sleep 50", "give 4")

        async def play():
            episode = episodes.pool.open(PROMPT)
            await episode.begin()
            waits = asyncio.create_task(episode.reply(say("wait")))
            await asyncio.to_thread(wait_for, begun.exists, START_S, "the job of the member")
            member.kill()
            with pytest.raises(WorkerLost) as lost:
                await waits
            assert not lost.value.by_other
            return await episodes.do("fine")

        assert run(play()) == ""
        assert rewards() == [3.0, 1.0, 4.0]
        assert groups.pool.counts["moved"] == 3 and groups.pool.scored_by == {"rank 0": 3}
        assert groups.pool.counts["retried"] == 0 and episodes.replaced == 0
        gone(own)
        made.becomes(0, Status.LOST)


def test_the_machine_with_the_fewest_jobs_for_each_worker_gets_the_next():
    large, small = (SimpleNamespace(count=count, jobs=Counter()) for count in (3, 1))
    for _ in range(8):
        least_busy([large, small], "reward").jobs["reward"] += 1
    assert (large.jobs["reward"], small.jobs["reward"]) == (6, 2)


def test_both_ends_notice_a_cut_network_and_the_member_comes_again(tmp_path, members_first):
    groups, begun = Groups(timeout_s=60.0), tmp_path / "begun"
    endpoint = Endpoint(network_namespace.HERE, insecure=True)
    with network_namespace.network_namespace() as namespace:
        prefix, cable = ["ip", "netns", "exec", namespace], f"{namespace[4:]}h"
        with ServedMembers(tmp_path, groups, endpoint=endpoint) as made:
            made.start(prefix=prefix)
            made.joined(1)
            rewards = doing(groups, f"once {begun} sleep 50", "give 2")
            wait_for(begun.exists, START_S, "the job of the member")
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)
            assert rewards() == [1.0, 2.0] and groups.pool.counts["moved"] == 2
            subprocess.run(["ip", "link", "set", cable, "up"], check=True)
            made.joined(1)
            assert done(groups, "fine") == [""]
            (name,) = groups.pool.scored_by.keys() - {"rank 0"}
            assert name.startswith("worker 0 on "), "it has kept its number"


def test_without_the_token_no_route_of_a_member_answers(shared):
    made, _ = shared
    made.joined(1)
    url = made.registry.view(Kind.WORKER, 0).location.url
    routes = [("POST", "/reward/1"), ("DELETE", "/environment/1"), ("DELETE", "")]
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for method, route in routes:
            assert call(url, method, CALLS + route, headers, b"{}")[0] == 401


def test_a_member_that_cannot_load_the_code_or_fails_the_trial_gets_no_job_and_says_why(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("LRL_TEST_THIS_MACHINE", "1")
    groups = Groups()
    groups.pool = RewardPool([odd_rewards.of_this_machine], 1, max_failures=0.5)
    with ServedMembers(tmp_path, groups) as made:
        groups.pool.close()
        groups.pool.start(LOOP, PROMPT)
        fails, lacks = made.start(without="LRL_TEST_THIS_MACHINE"), made.start(path=str(ROOT))
        message, _ = fails.communicate(timeout=START_S)
        assert fails.returncode == 1 and "the run has not admitted it: The rewards" in message
        assert "KeyError: 'LRL_TEST_THIS_MACHINE'" in made.refusal
        message, _ = lacks.communicate(timeout=START_S)
        for said in (message, made.refusal):
            assert "No module named 'odd_rewards'" in said
        assert not groups.pool.counts["scored"], "a trial is no response"


def test_a_member_that_rank_0_does_not_reach_gets_no_job_and_is_told_the_remedy(shared):
    registry = shared[0].registry
    number = registry.claim(Kind.WORKER)
    registry.register(Kind.WORKER, number, Location("http://127.0.0.1:1"), "far", 1)
    shared[0].becomes(number, Status.REFUSED)
    why = registry.view(Kind.WORKER, number).why
    assert "cannot be reached at http://127.0.0.1:1" in why and "lrl join --host" in why


# ---- a member that leaves, and one that is the only one


def test_a_member_that_leaves_has_time_for_its_episodes_and_the_last_must_stay(tmp_path):
    episodes = Episodes(workers=0, timeout_s=20.0)
    with ServedMembers(tmp_path, episodes) as made:
        first = made.start()
        made.joined(1)
        own = psutil.Process(first.pid).children(recursive=True)
        made.registry.ask_to_leave(Kind.WORKER, 0)
        stays = lambda: made.registry.view(Kind.WORKER, 0).leave_refusal  # noqa: E731
        wait_for(stays, START_S, "the answer")
        assert "is the last one that plays" in stays()

        async def leave():
            episode = episodes.pool.open(PROMPT)
            await episode.begin()
            await asyncio.to_thread(made.start)
            await asyncio.to_thread(made.joined, 2)
            made.registry.ask_to_leave(Kind.WORKER, 0)
            await asyncio.to_thread(made.joined, 1)
            assert made.registry.view(Kind.WORKER, 0).leaving, "it still has an episode"
            reply = await episode.reply(say("a"))
            episode.close()
            return reply

        assert run(leave()).reward == 0.25
        made.becomes(0, Status.LEFT)
        assert first.wait(START_S) == 0
        gone(own)


def test_episodes_wait_for_a_member_and_at_the_limit_the_error_says_for_what(monkeypatch):
    episodes = Episodes(workers=0, timeout_s=20.0)
    episodes.pool.start(LOOP)
    episodes.pool.workers.members.last_loss = "worker 0 on far: its machine is gone"
    monkeypatch.setattr("lrl.environments.pool.OUTAGE_S", 0.0)
    with pytest.raises(NoEnvironments, match=r"workers is 0, .*because: worker 0 .* is gone"):
        run(episodes.pool.open(PROMPT).begin())
    episodes.pool.close()
    with pytest.raises(WorkerLost, match="not running"):
        run(episodes.pool.open(PROMPT).begin())


# ---- a member that does not do what members do

SPEC = WorkerSpec("reward", b"\x00\xff", timeout_s=1.0, memory_gib=None, start_timeout_s=120.0)


class Answers:
    """A server in a member's place, which answers a call as it is told, or not at all."""

    def __init__(self, answer=None, spec=SPEC):
        self.answer = answer
        self.asked = threading.Event()
        self.cancelled = threading.Event()
        route = CALLS + "/{pool}/{job}"
        self.server = TokenServer(Endpoint(), TOKEN, [web.post(route, self.call)])
        self.pool = WorkerPool(spec, 1)
        self.pool.started = True
        self.members = Members(self.pool)
        self.member = RemoteWorkers(0, "far", 1, location=self.server.location(), token=TOKEN)
        self.members.add(self.member)

    async def call(self, request):
        self.asked.set()
        try:
            await asyncio.sleep(600.0 if self.answer is None else 0.0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return web.json_response(self.answer)

    async def ask(self, read=str):
        job = self.pool.job_on(self.member)
        try:
            return await job.begin(b"", read)
        finally:
            job.end()

    def close(self):
        self.members.close()
        self.server.close()


def test_a_member_whose_answer_cannot_be_read_is_lost():
    def read(answer):
        raise BadAnswer("odd")

    made = Answers({"answer": 1, "replaced": 0})
    with pytest.raises(WorkerLost, match="odd"):
        run(made.ask(read))
    assert made.members.ready == []
    made.close()


def test_what_a_lost_member_was_asked_fails_at_once_and_it_gets_no_more():
    silent = Answers()

    async def asked():
        silent.asked.clear()
        task = asyncio.create_task(silent.ask())
        assert await asyncio.to_thread(silent.asked.wait, START_S)
        return task

    async def scene():
        (stops := await asked()).cancel()  # whoever waits may stop waiting: no member is lost
        with pytest.raises(asyncio.CancelledError):
            await stops
        assert await asyncio.to_thread(silent.cancelled.wait, START_S), "its worker is free"
        waiting = await asked()
        assert not silent.member.idle and silent.members.remove(0, "it is silent")
        for asks in (waiting, silent.ask()):
            with pytest.raises(WorkerLost, match="silent"):
                await asks

    run(scene())
    assert silent.members.ready == [] and silent.member.idle
    silent.close()


def test_a_member_that_never_answers_is_given_up_at_a_deadline():
    made = Answers(spec=replace(SPEC, timeout_s=0.01, start_timeout_s=0.0))
    with pytest.raises(WorkerLost, match="no answer from it in"):
        run(made.ask())
    assert made.members.ready == []
    made.close()


@pytest.mark.parametrize(
    "answer",
    [
        "no object",
        {},
        {"answer": 1, "replaced": "1"},
        {"failed": ["bad_day", "it rains", None], "replaced": 0},
        {"failed": ["crash", "it rains", "0"], "replaced": 0},
    ],
)
def test_a_member_that_answers_what_none_does_is_lost(answer):
    made = Answers(answer)
    with pytest.raises(WorkerLost, match="is no answer to a call"):
        run(made.ask())
    assert made.members.ready == []
    made.close()
