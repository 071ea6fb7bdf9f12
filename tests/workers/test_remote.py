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
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from aiohttp import web

from lrl.errors import NoEnvironments, WorkerLost
from lrl.generators.settings import ServerSettings
from lrl.members.registry import Kind, Status
from lrl.members.run_members import WorkerAdmission, poll_forever
from lrl.rewards import RewardPool
from lrl.rewards.pool import read_outcomes
from lrl.system.auth import TokenServer
from lrl.system.endpoint import Endpoint, Location
from lrl.workers.pool import Members, WorkerPool, least_busy
from lrl.workers.process import WorkerSpec
from lrl.workers.remote import CALLS, RemoteWorkers
from tests import network_namespace
from tests.event_loop import LOOP, run
from tests.http_call import call
from tests.leftovers import lives, wait_for, wait_for_none
from tests.made import rollout
from tests.members.served_run import TOKEN, served, spec_of
from tests.workers.jobs import PROMPT, episodes, failure, failures, groups, say

ROOT = Path(__file__).parents[2]
START_S = 120.0


class ServedMembers(ExitStack):
    """The pools' workers on this machine, a server at which members join them, as at rank 0, and
    real members."""

    def __init__(self, folder, *pools, first=None, **endpoint):
        super().__init__()
        self.folder = folder
        for pool in pools:
            self.callback(pool.close)
            pool.start(LOOP, first)
        self.members = Members(*(pool.workers for pool in pools))
        spec = spec_of("pull", generators=0, terms=self.members.terms())
        settings = asdict(ServerSettings(**endpoint))
        self.server = self.enter_context(served(replace(spec, settings=settings), **endpoint))
        self.registry = self.server.registry
        admission = WorkerAdmission(self.members, self.registry, TOKEN)
        self.callback(LOOP.submit(poll_forever(admission.poll)).cancel)
        self.callback(self.registry.end)

    def start(self, *prefix, **variables):
        """Starts `lrl join` with one worker."""
        lrl = str(Path(sys.executable).with_name("lrl"))
        own = ["join", self.server.location().url, "--kind", "worker", "--workers", "1"]
        process = subprocess.Popen(
            [*prefix, lrl, *own],
            env=os.environ | {"LRL_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)} | variables,
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
    pools = [groups(), episodes()]
    with ServedMembers(tmp_path_factory.mktemp("member"), *pools) as made:
        made.start()
        made.joined(1)
        yield made, pools


def doing(pool, *texts):
    """Scores a group beside what the test does; the result waits for its rewards."""
    rollouts = [rollout(text=text) for text in texts]
    score = LOOP.submit(pool.score(PROMPT, rollouts))

    def rewards():
        score.result(START_S)
        return [rollout.reward for rollout in rollouts]

    return rewards


def gone(processes):
    assert processes
    wait_for_none(lambda: filter(lives, processes), 60.0, "the member's processes")


ENDS = {
    "crash": "the worker was ended by signal 11",
    "leak": "MemoryError; data.",
    "hang": " after 1 s",
}


def test_one_member_does_what_the_run_has_and_each_failure_names_it(shared, members_first):
    made, pools = shared
    (member,) = made.members.ready
    kinds = [
        {"crash": "crash: ", "leak": "memory: ", "hang": "timeout: "},
        {"crash": "environment_error: ", "leak": "environment_error: ", "hang": "tool_timeout: "},
    ]
    for pool, tries, kind in zip(pools, (2, 1), kinds, strict=True):
        found = failures(pool)
        assert found.pop("fine") == ""
        for order, why in found.items():
            assert why.startswith(kind[order]) and ENDS[order] in why
            assert why.endswith(f" ({member.name})")
        assert pool.workers.replaced == tries * len(ENDS)
    scoring, playing = pools
    assert scoring.scored_by == playing.answered_by == {member.name: 1}
    assert member.name.startswith("worker 0 on ") and scoring.counts["moved"] == 0
    assert member.idle


def test_a_member_that_is_killed_in_mid_job_costs_none_and_its_processes_end_with_it(
    tmp_path, members_first
):
    scoring, playing, begun = groups(timeout_s=60.0), episodes(timeout_s=60.0), tmp_path / "begun"
    with ServedMembers(tmp_path, scoring, playing) as made:
        member = made.start()
        made.joined(1)
        own = psutil.Process(member.pid).children(recursive=True)
        rewards = doing(scoring, "give 3", f"once {begun} loop", "give 4")

        async def play():
            episode = playing.open(PROMPT)
            await episode.begin()
            waits = asyncio.create_task(episode.reply(say("wait")))
            await asyncio.to_thread(wait_for, begun.exists, START_S, "the job of the member")
            member.kill()
            with pytest.raises(WorkerLost) as lost:
                await waits
            assert not lost.value.by_other
            return await failure(playing, "fine")

        assert run(play()) == ""
        assert rewards() == [3.0, 1.0, 4.0]
        assert scoring.counts["moved"] == 3 and scoring.scored_by == {"rank 0": 3}
        assert scoring.counts["retried"] == 0 and playing.workers.replaced == 0
        gone(own)
        made.becomes(0, Status.LOST)


def test_the_machine_with_the_fewest_jobs_for_each_worker_gets_the_next():
    large, small = (SimpleNamespace(count=count, jobs=Counter()) for count in (3, 1))
    for _ in range(8):
        least_busy([large, small], "reward").jobs["reward"] += 1
    assert (large.jobs["reward"], small.jobs["reward"]) == (6, 2)


def test_both_ends_notice_a_cut_network_and_the_member_comes_again(
    tmp_path, members_first, monkeypatch
):
    monkeypatch.setattr("lrl.members.registry.LEASE_S", 5.0)
    scoring, begun = groups(timeout_s=60.0), tmp_path / "begun"
    endpoint = {"host": network_namespace.HERE, "insecure": True}
    with network_namespace.network_namespace() as namespace:
        cable = ["ip", "link", "set", f"{namespace[4:]}h"]
        with ServedMembers(tmp_path, scoring, **endpoint) as made:
            made.start("ip", "netns", "exec", namespace)
            made.joined(1)
            rewards = doing(scoring, f"once {begun} sleep 50", "give 2")
            wait_for(begun.exists, START_S, "the job of the member")
            subprocess.run([*cable, "down"], check=True)
            assert rewards() == [1.0, 2.0] and scoring.counts["moved"] == 2
            subprocess.run([*cable, "up"], check=True)
            made.joined(1)
            assert run(failure(scoring, "fine")) == ""
            (name,) = scoring.scored_by.keys() - {"rank 0"}
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
    own = tmp_path / "own"
    own.mkdir()
    (own / "only_here.py").write_text(
        "import os\ndef number(prompt, response, **columns):\n    return float(os.environ['NUMBER'])\n"
    )
    monkeypatch.syspath_prepend(own)
    monkeypatch.setenv("NUMBER", "1")
    scoring = RewardPool(["only_here:number"], workers=1, max_failures=0.5)
    with ServedMembers(tmp_path, scoring, first=PROMPT) as made:
        fails, lacks = made.start(NUMBER="", PYTHONPATH=f"{ROOT}:{own}"), made.start()
        message, _ = fails.communicate(timeout=START_S)
        assert fails.returncode == 1 and "the run has not admitted it: The rewards" in message
        assert "ValueError: could not convert string to float" in made.refusal
        message, _ = lacks.communicate(timeout=START_S)
        for said in (message, made.refusal):
            assert "No module named 'only_here'" in said
        assert not scoring.counts["scored"], "a trial is no response"


def test_a_member_that_rank_0_does_not_reach_gets_no_job_and_is_told_the_remedy(shared):
    registry = shared[0].registry
    number = registry.claim(Kind.WORKER)
    registry.register(Kind.WORKER, number, Location("http://127.0.0.1:1"), "far", 1)
    shared[0].becomes(number, Status.REFUSED)
    why = registry.view(Kind.WORKER, number).why
    assert "cannot be reached at http://127.0.0.1:1" in why and "lrl join --host" in why


# ---- a member that leaves, and one that is the only one


def test_a_member_that_leaves_has_time_for_its_episodes_and_the_last_must_stay(tmp_path):
    playing = episodes(timeout_s=20.0, workers=0)
    with ServedMembers(tmp_path, playing) as made:
        first = made.start()
        made.joined(1)
        own = psutil.Process(first.pid).children(recursive=True)
        made.registry.ask_to_leave(Kind.WORKER, 0)
        member = lambda: made.registry.view(Kind.WORKER, 0)  # noqa: E731
        wait_for(lambda: member().leave_refusal, START_S, "the answer")
        assert "is the last one that plays" in member().leave_refusal

        async def leave():
            episode = playing.open(PROMPT)
            await episode.begin()
            await asyncio.to_thread(made.start)
            await asyncio.to_thread(made.joined, 2)
            made.registry.ask_to_leave(Kind.WORKER, 0)
            await asyncio.to_thread(made.joined, 1)
            assert member().leaving, "it still has an episode"
            reply = await episode.reply(say("a"))
            episode.close()
            return reply

        assert run(leave()).reward == 0.25
        made.becomes(0, Status.LEFT)
        assert first.wait(START_S) == 0
        gone(own)


def test_episodes_wait_for_a_member_and_at_the_limit_the_error_says_for_what(monkeypatch):
    playing = episodes(workers=0)
    playing.start(LOOP)
    playing.workers.members.last_loss = "worker 0 on far: its machine is gone"
    monkeypatch.setattr("lrl.environments.pool.OUTAGE_S", 0.0)
    with pytest.raises(NoEnvironments, match=r"workers is 0, .*because: worker 0 .* is gone"):
        run(playing.open(PROMPT).begin())
    playing.close()
    with pytest.raises(WorkerLost, match="not running"):
        run(playing.open(PROMPT).begin())


# ---- a member that does not do what members do


class Answers:
    """A server in a member's place, which answers a call as it is told, or not at all."""

    def __init__(self, answer=None, **limits):
        self.answer = answer
        self.asked = threading.Event()
        self.cancelled = threading.Event()
        route = CALLS + "/{pool}/{job}"
        self.server = TokenServer(Endpoint(), TOKEN, [web.post(route, self.call)])
        usual = {"timeout_s": 1.0, "memory_gib": None, "start_timeout_s": START_S}
        self.pool = WorkerPool(WorkerSpec("reward", b"\x00\xff", **usual | limits), 1)
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

    async def ask(self):
        job = self.pool.job_on(self.member)
        try:
            return await job.begin(b"", partial(read_outcomes, count=1))
        finally:
            job.end()

    def close(self):
        self.members.close()
        self.server.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("no object", "is no answer to a call"),
        ({}, "is no answer to a call"),
        ({"answer": [None], "replaced": "1"}, "is no answer to a call"),
        ({"failed": ["bad_day", "it rains", None], "replaced": 0}, "is no answer to a call"),
        ({"failed": ["crash", "it rains", "0"], "replaced": 0}, "is no answer to a call"),
        ({"answer": [None, None], "replaced": 0}, "no list of 1 outcomes"),
        (None, "no answer from it in"),
    ],
)
def test_a_member_that_answers_nothing_or_what_none_does_is_lost(answer, words):
    limits = {"timeout_s": 0.01, "start_timeout_s": 0.0} if answer is None else {}
    with closing(Answers(answer, **limits)) as made:
        with pytest.raises(WorkerLost, match=words):
            run(made.ask())
        assert made.members.ready == []


def test_what_a_lost_member_was_asked_fails_at_once_and_it_gets_no_more():
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

    with closing(Answers()) as silent:
        run(scene())
        assert silent.members.ready == [] and silent.member.idle
