"""A response has one outcome, and the same failures, wherever it is scored: real scorers, real
deaths.

Covers lrl/rewards/job.py, job_state.py, scorer_server.py, lrl/system/remote_workers.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # reward workers import `odd_rewards` by this name

import odd_rewards  # noqa: E402
from scenes import all_gone, children, counted, rollouts_of, scored, start_afresh  # noqa: E402
from served_scorers import ServedPool, served  # noqa: E402

from lrl.errors import BadAnswer, ScorerLostError  # noqa: E402
from lrl.members.registry import Kind, Status  # noqa: E402
from lrl.rewards import RewardPool  # noqa: E402
from lrl.rewards.job import Job, ScoringTerms, WorkerSpec, read_outcomes  # noqa: E402
from lrl.rewards.job_state import Outcome, Scored  # noqa: E402
from lrl.rewards.remote_pool import SCORE, RemoteScorers, least_busy  # noqa: E402
from lrl.system.endpoint import Endpoint, Location  # noqa: E402
from lrl.system.remote_workers import MemberAddress  # noqa: E402
from lrl.system.token_server import TokenServer  # noqa: E402
from lrl.types import Prompt, Rollout  # noqa: E402
from tests import network_namespace  # noqa: E402
from tests.certificates import self_signed  # noqa: E402
from tests.http_call import call  # noqa: E402
from tests.leftovers import wait_for  # noqa: E402
from tests.members.served_workers import START_S, TOKEN  # noqa: E402

TIMEOUT_S = 3.0
ORDERS = [
    "give 1",
    "give 0",
    "raise why",
    "loop",
    "exit",
    "segfault",
    "hog",
    "text",
    "list",
    "give nan",
]


@pytest.fixture
def scorers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's own workers score only what no scorer can."""
    monkeypatch.setattr("lrl.rewards.pool.least_busy", lambda scorers: next(iter(scorers)))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    """A pool with one scorer."""
    pool = RewardPool([odd_rewards.obey], workers=1, timeout_s=TIMEOUT_S, memory_gib=0.5)
    with served(pool, tmp_path_factory.mktemp("scorer")) as made:
        made.start_scorer()
        made.joined(1)
        yield made


@pytest.fixture
def remote(shared: ServedPool, scorers_first: None) -> RewardPool:
    """That pool, whose scorer scores everything."""
    shared.joined(1)
    return start_afresh(shared.pool)


class Scoring(threading.Thread):
    """Scores responses, beside what the test does."""

    def __init__(self, pool: RewardPool, *responses: str) -> None:
        super().__init__(daemon=True)
        self.pool = pool
        self.rollouts = rollouts_of(*responses)
        self.start()

    def run(self) -> None:
        asyncio.run(self.pool.score(Prompt(id=0, token_ids=[1], text=""), self.rollouts))

    def done(self) -> list[Rollout]:
        """Waits for the end."""
        self.join(START_S)
        assert not self.is_alive()
        return self.rollouts


def test_responses_are_scored_on_another_machine(remote: RewardPool) -> None:
    before = remote.scored_by.total()
    assert [each.reward for each in scored(remote, "give 1", "give 0.5", "give -2")] == [
        1.0,
        0.5,
        -2.0,
    ]
    (name,) = remote.scored_by
    assert name.startswith("scorer 0 on ") and remote.scored_by[name] == before + 3
    assert counted(remote) == {"scored": 3}


def test_failures_at_a_scorer_have_the_kinds_and_the_counts_of_rank_0(remote: RewardPool) -> None:
    here = RewardPool(
        [odd_rewards.obey], workers=1, timeout_s=TIMEOUT_S, memory_gib=0.5, max_failures=1.0
    )
    here.start()
    beside = Scoring(here, *ORDERS)
    there, on_rank_0 = scored(remote, *ORDERS), beside.done()
    here.close()
    assert [each.reward for each in there] == [each.reward for each in on_rank_0]
    kinds = [
        [str(each.reward_failure).partition(":")[0] for each in rollouts]
        for rollouts in (there, on_rank_0)
    ]
    assert kinds[0] == kinds[1] and counted(remote) == counted(here)
    assert (
        counted(remote)["timeout"] == counted(remote)["memory"] == 1
        and counted(remote)["crash"] == 2
    )
    assert remote.counts["replaced"] > 0 and remote.counts["moved"] == 0
    assert " (scorer 0 on " in str(there[2].reward_failure)


def test_a_scorer_that_is_killed_in_mid_job_costs_no_response(
    tmp_path: Path, scorers_first: None
) -> None:
    pool, begun = RewardPool([odd_rewards.obey], workers=1, timeout_s=60.0), tmp_path / "begun"
    with served(pool, tmp_path) as made:
        scorer = made.start_scorer()
        made.joined(1)
        workers = children(scorer.pid)
        scoring = Scoring(pool, "give 3", f"once {begun} sleep 50", "give 4")
        wait_for(begun.exists, START_S, "the job at the scorer")
        scorer.kill()
        assert [each.reward for each in scoring.done()] == [3.0, 1.0, 4.0]
        assert counted(pool) == {"scored": 3} and pool.scored_by == {"rank 0": 3}
        assert pool.counts["moved"] == 3 and not pool.remote.ready
        assert all_gone(workers)


def test_a_scorer_that_joins_later_is_used_and_the_least_busy_workers_get_the_next_job(
    tmp_path: Path,
) -> None:
    pool = RewardPool([odd_rewards.obey], workers=1, timeout_s=60.0)
    with served(pool, tmp_path) as made:
        assert scored(pool, "give 1")[0].reward == 1.0 and pool.scored_by == {"rank 0": 1}
        made.start_scorer()
        made.joined(1)
        begun = tmp_path / "begun"
        scoring = Scoring(pool, f"once {begun} sleep 50")
        wait_for(begun.exists, START_S, "the job at the scorer")
        assert scored(pool, "give 1", "give 2")[1].reward == 2.0, "the scorer is busy"
        assert pool.scored_by == {"rank 0": 3}
        made.close()
        assert scoring.done()


def test_a_scorer_ends_when_the_run_says_that_it_is_over(tmp_path: Path) -> None:
    pool = RewardPool([odd_rewards.obey], workers=1)
    with served(pool, tmp_path) as made:
        scorer = made.start_scorer()
        made.joined(1)
        made.registry.end()
        message, _ = scorer.communicate(timeout=START_S)
        assert scorer.returncode == 0 and message.endswith(
            "scorer 0: the run has ended, and so does it.\n"
        )


def test_jobs_go_where_the_fewest_are_for_each_worker() -> None:
    class Model:
        def __init__(self, name: str, workers: int) -> None:
            self.name = name
            self.workers = workers
            self.in_flight = 0

        async def outcomes(self, job: Job) -> list[Outcome]:
            return []

    large, small = Model("large", 3), Model("small", 1)
    given = []
    for _ in range(8):
        chosen = least_busy([large, small])
        chosen.in_flight += 1
        given.append(chosen.name)
    assert given.count("large") == 6 and given.count("small") == 2
    assert given[:3] == ["large"] * 3


def test_both_ends_notice_a_cut_network_and_the_scorer_comes_again(
    tmp_path: Path, scorers_first: None
) -> None:
    pool, begun = RewardPool([odd_rewards.obey], workers=1, timeout_s=60.0), tmp_path / "begun"
    endpoint = Endpoint(network_namespace.HERE, insecure=True)
    with network_namespace.network_namespace() as namespace:
        prefix, cable = ["ip", "netns", "exec", namespace], f"{namespace[4:]}h"
        with served(pool, tmp_path, endpoint=endpoint) as made:
            made.start_scorer(prefix=prefix)
            made.joined(1)
            scoring = Scoring(pool, f"once {begun} sleep 50", "give 2")
            wait_for(begun.exists, START_S, "the job at the scorer")
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)
            assert [each.reward for each in scoring.done()] == [1.0, 2.0]
            assert pool.counts["moved"] == 2 and pool.scored_by == {"rank 0": 2}
            subprocess.run(["ip", "link", "set", cable, "up"], check=True)
            made.joined(1)
            assert scored(pool, "give 1", "give 2")[1].reward == 2.0
            (name,) = pool.scored_by.keys() - {"rank 0"}
            assert name.startswith("scorer 0 on "), "it has kept its number"


RANK_0 = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
import odd_rewards
from tests.members.served_workers import Joinable
from lrl.members.registry import Kind
from lrl.system.endpoint import Endpoint
from lrl.rewards import RewardPool

if __name__ == "__main__":
    pool = RewardPool([odd_rewards.obey], workers=1)
    pool.start()
    print(Joinable(Kind.SCORER, pool.remote, Endpoint()).server.location().url, flush=True)
    while not pool.remote.ready:
        time.sleep(0.05)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_scorer_and_its_workers_end_with_a_trainer_that_is_killed(
    shared: ServedPool, tmp_path: Path
) -> None:
    (tmp_path / "rank_0.py").write_text(RANK_0)
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    environment = os.environ | {"PYTHONPATH": path}
    words = [sys.executable, str(tmp_path / "rank_0.py")]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as rank_0:
        try:
            assert rank_0.stdout is not None
            scorer = shared.start_scorer(url=rank_0.stdout.readline().strip())
            assert rank_0.stdout.readline() == "ready\n"
            workers = children(scorer.pid)
        finally:
            rank_0.kill()
    message, _ = scorer.communicate(timeout=START_S)
    assert scorer.returncode == 0 and message.endswith(
        "scorer 0: the run has ended, and so does it.\n"
    )
    assert workers and all_gone(workers)


def test_without_the_token_no_scorer_joins(shared: ServedPool, tmp_path: Path) -> None:
    scorer = shared.start_scorer(token="another-token-of-a-run")
    message, _ = scorer.communicate(timeout=START_S)
    assert scorer.returncode == 2 and "only with the token of that run" in message
    assert len(shared.pool.remote.ready) == 1


def test_a_scorer_on_which_the_trial_fails_gets_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRL_TEST_THIS_MACHINE", "1")
    pool = RewardPool([odd_rewards.of_this_machine], workers=1)
    with served(pool, tmp_path, first=Prompt(id=0, token_ids=[1], text="")) as made:
        refused, taken = made.start_scorer(without="LRL_TEST_THIS_MACHINE"), made.start_scorer()
        made.joined(1)
        message, _ = refused.communicate(timeout=START_S)
        assert (
            refused.returncode == 1
            and "the trial response, which rank 0 has scored, fails here" in message
        )
        assert "KeyError: 'LRL_TEST_THIS_MACHINE'" in made.refusal and taken.poll() is None
        assert not pool.scored_by, "a trial is no response"


def test_a_scorer_knows_the_run_by_its_certificate(tmp_path: Path, scorers_first: None) -> None:
    cert, key = self_signed(tmp_path)
    pool = RewardPool([odd_rewards.obey], workers=1)
    with served(pool, tmp_path, endpoint=Endpoint(tls_cert=cert, tls_key=key)) as made:
        stranger = made.start_scorer()  # by the system's authorities
        message, _ = stranger.communicate(timeout=START_S)
        assert stranger.returncode == 2 and "certificate verify failed" in message
        made.start_scorer("--run_cert", cert)
        made.joined(1)
        assert scored(pool, "give 1", "give 2")[1].reward == 2.0 and "rank 0" not in pool.scored_by


def test_ctrl_c_ends_a_scorer_and_others_score_its_responses(
    tmp_path: Path, scorers_first: None
) -> None:
    pool, begun = RewardPool([odd_rewards.obey], workers=1, timeout_s=60.0), tmp_path / "begun"
    with served(pool, tmp_path) as made:
        scorer = made.start_scorer()
        made.joined(1)
        workers = children(scorer.pid)
        scoring = Scoring(pool, f"once {begun} loop", "give 4")
        wait_for(begun.exists, START_S, "the job at the scorer")
        scorer.send_signal(signal.SIGINT)
        assert [each.reward for each in scoring.done()] == [1.0, 4.0] and counted(pool) == {
            "scored": 2
        }
        message, _ = scorer.communicate(timeout=START_S)
        assert (
            scorer.returncode == 0
            and "scorer 0: has left; its unfinished responses continue elsewhere" in message
        )
        assert all_gone(workers)


def test_a_scorer_without_the_module_says_so_on_both_ends_and_gets_no_job(
    shared: ServedPool, tmp_path: Path
) -> None:
    scorer = shared.start_scorer(path=tmp_path)
    message, _ = scorer.communicate(timeout=START_S)
    assert scorer.returncode == 1 and "No module named 'odd_rewards'" in message
    refusal = shared.refusal
    assert "No module named 'odd_rewards'" in refusal and "must be on this machine" in refusal
    assert refusal.startswith("Scorer ") and len(shared.pool.remote.ready) == 1


SPEC = WorkerSpec(b"", ("obey",), timeout_s=1.0, memory_gib=None, start_timeout_s=120.0)
ONE = Job.of("", [("give 1", {})])


class Answers:
    """A server in a scorer's place, which answers a job as it is told, or not at all."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.asked = threading.Event()
        self.cancelled = threading.Event()
        self.server = TokenServer(Endpoint(), TOKEN, [web.post(SCORE, self.score)])
        self.pool = RemoteScorers(SPEC)
        address = MemberAddress(0, "far", 1, location=self.server.location(), token=TOKEN)
        self.scorer = self.pool.reach(address)
        self.pool.add(self.scorer)

    async def score(self, request: web.Request) -> web.Response:
        self.asked.set()
        try:
            await asyncio.sleep(600.0 if self.answer is None else 0.0)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return web.json_response(self.answer)

    def close(self) -> None:
        self.pool.close()
        self.server.close()


@pytest.fixture
def silent() -> Iterator[Answers]:
    made = Answers()
    yield made
    made.close()


def test_the_jobs_of_a_lost_scorer_fail_at_once_and_it_gets_no_more(silent: Answers) -> None:
    async def scene() -> None:
        waiting = asyncio.create_task(silent.scorer.outcomes(ONE))
        assert await asyncio.to_thread(silent.asked.wait, START_S)
        assert silent.scorer.in_flight == 1 and silent.pool.remove(0, "it is silent")
        with pytest.raises(ScorerLostError, match="silent"):
            await waiting
        with pytest.raises(ScorerLostError, match="silent"):
            await silent.scorer.outcomes(ONE)

    asyncio.run(scene())
    assert (
        silent.pool.ready == []
        and silent.scorer.in_flight == 0
        and not silent.pool.remove(0, "again")
    )
    assert silent.cancelled.wait(START_S), "its worker is free for other jobs"


def test_who_waits_for_a_job_may_stop_waiting(silent: Answers) -> None:
    async def scene() -> None:
        waiting = asyncio.create_task(silent.scorer.outcomes(ONE))
        assert await asyncio.to_thread(silent.asked.wait, START_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(scene())
    assert silent.cancelled.wait(START_S) and silent.pool.ready == [silent.scorer]


def test_a_scorer_that_never_answers_is_given_up_at_a_deadline(silent: Answers) -> None:
    silent.pool.spec = replace(SPEC, timeout_s=0.01, start_timeout_s=0.0)
    with pytest.raises(ScorerLostError, match="no answer from it in"):
        asyncio.run(silent.scorer.outcomes(ONE))
    assert silent.scorer.in_flight == 0 and silent.pool.ready == []


@pytest.mark.parametrize(
    "answer",
    [
        "no object",
        {},
        {"outcomes": [[1.0, {}, ""]], "replaced": "1"},
        {"outcomes": [], "replaced": 0},
    ],
)
def test_a_scorer_that_answers_what_none_does_is_lost(answer: object) -> None:
    made = Answers(answer)
    try:
        with pytest.raises(ScorerLostError, match="outcomes"):
            asyncio.run(made.scorer.outcomes(ONE))
        assert made.pool.ready == []
    finally:
        made.close()


def test_a_scorer_that_rank_0_does_not_reach_gets_no_job_and_is_told_the_remedy(
    shared: ServedPool,
) -> None:
    number = shared.registry.claim(Kind.SCORER)
    shared.registry.register(Kind.SCORER, number, Location("http://127.0.0.1:1"), "far", 1)

    def member():
        return shared.registry.view(Kind.SCORER, number)

    wait_for(lambda: member().status is Status.REFUSED, START_S, "its refusal")
    assert (
        "cannot be reached at http://127.0.0.1:1" in member().why
        and "lrl join --host" in member().why
    )
    assert len(shared.pool.remote.ready) == 1


def test_without_the_token_no_route_of_a_scorer_answers(shared: ServedPool) -> None:
    shared.joined(1)
    member = shared.registry.view(Kind.SCORER, 0)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for method in ("GET", "POST"):
            assert call(member.location.url, method, SCORE, headers, b"x")[0] == 401
    status, _ = call(member.location.url, "POST", SCORE, {"Authorization": f"Bearer {TOKEN}"}, b"x")
    assert status == 400, "it does not say how many responses"


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        [None, None],
        ["well: done"],
        [1.0],
        [[float("nan"), {}, ""]],
        [[True, {"obey": 1.0}, ""]],
        [[1.0, {"obey": "1"}, ""]],
        [[1.0, {}]],
    ],
)
def test_what_is_no_outcome_is_no_reward(values: object) -> None:
    with pytest.raises(BadAnswer):
        read_outcomes(values, count=1)


def test_what_a_scorer_must_know_travels_as_it_is() -> None:
    for trial in (None, ONE):
        terms = ScoringTerms(WorkerSpec(b"\x00\xff", ("a", "b"), 1.5, None, 60.0), trial)
        assert ScoringTerms.from_json(json.loads(json.dumps(terms.to_json()))) == terms


def test_outcomes_travel_as_they_are() -> None:
    outcomes = [
        Scored(0.5, {"a/b": 0.25, "c": 0.25}, "math: too much"),
        "timeout: obey: no reward after 1 s",
        None,
    ]
    assert read_outcomes(json.loads(json.dumps(outcomes)), 3) == outcomes
