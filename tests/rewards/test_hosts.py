"""A response has one outcome, and the same failures, wherever it is scored: real hosts, real deaths."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # reward workers import `odd_rewards` by this name

import odd_rewards  # noqa: E402
from scenes import all_gone, children, counted, rollouts_of, scored, start_afresh  # noqa: E402
from served_hosts import START_S, TOKEN, ServedPool, served  # noqa: E402

from lrl.generators.auth import bearer  # noqa: E402
from lrl.generators.endpoint import Endpoint  # noqa: E402
from lrl.rewards import RewardPool  # noqa: E402
from lrl.rewards.hosts import Host, HostLostError, Hosts, least_busy  # noqa: E402
from lrl.rewards.job import Job, WorkerSpec  # noqa: E402
from lrl.rewards.job_state import Outcome, Scored  # noqa: E402
from lrl.rewards.messages import ROUTE, BadReportError, read_outcomes, read_welcome, report  # noqa: E402
from lrl.types import Prompt, Rollout  # noqa: E402
from tests import network_namespace  # noqa: E402
from tests.certificates import self_signed  # noqa: E402
from tests.leftovers import wait_for  # noqa: E402

TIMEOUT_S = 3.0
ORDERS = ["give 1", "give 0", "raise why", "loop", "exit", "segfault", "hog", "text", "list", "give nan"]


@pytest.fixture
def hosts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's own workers score only what no host can."""
    monkeypatch.setattr("lrl.rewards.pool.least_busy", lambda scorers: next(iter(scorers)))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    """A pool with one host."""
    pool = RewardPool([odd_rewards.obey], workers=1, timeout_s=TIMEOUT_S, memory_gib=0.5)
    with served(pool, tmp_path_factory.mktemp("host")) as made:
        made.start_host()
        made.joined(1)
        yield made


@pytest.fixture
def remote(shared: ServedPool, hosts_first: None) -> RewardPool:
    """That pool, whose host scores everything."""
    shared.joined(1)
    return start_afresh(shared.pool)


class Scoring(threading.Thread):
    """Scores responses, beside what the test does."""

    def __init__(self, pool: RewardPool, *responses: str) -> None:
        super().__init__(daemon=True)
        self.pool, self.rollouts = pool, rollouts_of(*responses)
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
    assert [each.reward for each in scored(remote, "give 1", "give 0.5", "give -2")] == [1.0, 0.5, -2.0]
    (name,) = remote.scored_by
    assert name.startswith("reward host 0 on ") and remote.scored_by[name] == before + 3
    assert counted(remote) == {"scored": 3}


def test_failures_on_a_host_have_the_kinds_and_the_counts_of_rank_0(remote: RewardPool) -> None:
    here = RewardPool([odd_rewards.obey], workers=1, timeout_s=TIMEOUT_S, memory_gib=0.5, max_failures=1.0)
    here.start()
    beside = Scoring(here, *ORDERS)
    there, on_rank_0 = scored(remote, *ORDERS), beside.done()
    here.close()
    assert [each.reward for each in there] == [each.reward for each in on_rank_0]
    kinds = [[str(each.reward_failure).partition(":")[0] for each in rollouts] for rollouts in (there, on_rank_0)]
    assert kinds[0] == kinds[1] and counted(remote) == counted(here)
    assert counted(remote)["timeout"] == counted(remote)["memory"] == 1 and counted(remote)["crash"] == 2
    assert remote.counts["replaced"] > 0 and remote.counts["moved"] == 0
    assert " (reward host 0 on " in str(there[2].reward_failure)


def test_a_host_that_is_killed_in_mid_job_costs_no_response(tmp_path: Path, hosts_first: None) -> None:
    pool, begun = RewardPool([odd_rewards.obey], workers=1, timeout_s=60.0), tmp_path / "begun"
    with served(pool, tmp_path) as made:
        host = made.start_host()
        made.joined(1)
        workers = children(host.pid)
        scoring = Scoring(pool, "give 3", f"once {begun} sleep 50", "give 4")
        wait_for(begun.exists, START_S, "the job on the host")
        host.kill()
        assert [each.reward for each in scoring.done()] == [3.0, 1.0, 4.0]
        assert counted(pool) == {"scored": 3} and pool.scored_by == {"rank 0": 3}
        assert pool.counts["moved"] == 3 and not pool.hosts.ready
        assert all_gone(workers)


def test_a_host_that_joins_later_is_used_and_the_least_busy_workers_get_the_next_job(tmp_path: Path) -> None:
    pool = RewardPool([odd_rewards.obey], workers=1, timeout_s=60.0)
    with served(pool, tmp_path) as made:
        assert scored(pool, "give 1")[0].reward == 1.0 and pool.scored_by == {"rank 0": 1}
        made.start_host()
        made.joined(1)
        begun = tmp_path / "begun"
        scoring = Scoring(pool, f"once {begun} sleep 50")
        wait_for(begun.exists, START_S, "the job on the host")
        assert scored(pool, "give 1", "give 2")[1].reward == 2.0, "the host is busy"
        assert pool.scored_by == {"rank 0": 3}
        made.close()
        assert scoring.done()


def test_a_host_ends_when_the_run_says_that_it_is_over(tmp_path: Path) -> None:
    pool = RewardPool([odd_rewards.obey], workers=1)
    with served(pool, tmp_path) as made:
        host = made.start_host()
        made.joined(1)
        pool.hosts.end()
        said, _ = host.communicate(timeout=START_S)
        assert host.returncode == 0 and said.endswith("reward host: the run has ended, and so does it.\n")


def test_jobs_go_where_the_fewest_are_for_each_worker() -> None:
    class Model:
        def __init__(self, name: str, workers: int) -> None:
            self.name, self.workers, self.in_flight = name, workers, 0

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


def test_both_ends_notice_a_cut_network_and_the_host_comes_again(tmp_path: Path, hosts_first: None) -> None:
    pool, begun = RewardPool([odd_rewards.obey], workers=1, timeout_s=60.0), tmp_path / "begun"
    endpoint = Endpoint(network_namespace.HERE, insecure=True)
    with network_namespace.network_namespace() as namespace:
        prefix, cable = ["ip", "netns", "exec", namespace], f"{namespace[4:]}h"
        with served(pool, tmp_path, heartbeat_s=4.0, endpoint=endpoint) as made:
            made.start_host(prefix=prefix)
            made.joined(1)
            scoring = Scoring(pool, f"once {begun} sleep 50", "give 2")
            wait_for(begun.exists, START_S, "the job on the host")
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)
            assert [each.reward for each in scoring.done()] == [1.0, 2.0]
            assert pool.counts["moved"] == 2 and pool.scored_by == {"rank 0": 2}
            subprocess.run(["ip", "link", "set", cable, "up"], check=True)
            made.joined(1)
            assert scored(pool, "give 1", "give 2")[1].reward == 2.0
            (name,) = pool.scored_by.keys() - {"rank 0"}
            assert name.startswith("reward host 0 on "), "it has kept its number"


RANK_0 = f"""
import sys, time
sys.path.insert(0, {str(HERE)!r})
import odd_rewards
from served_hosts import TOKEN, route_of
from lrl.generators.endpoint import Endpoint
from lrl.generators.token_server import TokenServer
from lrl.rewards import RewardPool

if __name__ == "__main__":
    pool = RewardPool([odd_rewards.obey], workers=1)
    pool.start()
    print(TokenServer(Endpoint(), TOKEN, [route_of(pool.hosts)]).location().url, flush=True)
    while not pool.hosts.ready:
        time.sleep(0.05)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_host_and_its_workers_end_with_a_trainer_that_is_killed(shared: ServedPool, tmp_path: Path) -> None:
    (tmp_path / "rank_0.py").write_text(RANK_0)
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    environment = os.environ | {"PYTHONPATH": path}
    words = [sys.executable, str(tmp_path / "rank_0.py")]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as rank_0:
        try:
            assert rank_0.stdout is not None
            host = shared.start_host(url=rank_0.stdout.readline().strip())
            assert rank_0.stdout.readline() == "ready\n"
            workers = children(host.pid)
        finally:
            rank_0.kill()
    said, _ = host.communicate(timeout=START_S)
    assert host.returncode == 0 and said.endswith("reward host: the run has ended, and so does it.\n")
    assert workers and all_gone(workers)


def test_without_the_token_no_host_joins(shared: ServedPool, tmp_path: Path) -> None:
    host = shared.start_host(token="another-token-of-a-run")
    said, _ = host.communicate(timeout=START_S)
    assert host.returncode == 2 and "the token is not the run's (LRL_TOKEN)" in said
    assert len(shared.pool.hosts.ready) == 1


def test_a_host_on_which_the_trial_fails_gets_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRL_TEST_THIS_MACHINE", "1")
    pool = RewardPool([odd_rewards.of_this_machine], workers=1)
    with served(pool, tmp_path, first=Prompt(id=0, token_ids=[1], text="")) as made:
        refused, taken = made.start_host(without="LRL_TEST_THIS_MACHINE"), made.start_host()
        made.joined(1)
        said, _ = refused.communicate(timeout=START_S)
        assert refused.returncode == 1 and "the trial response, which rank 0 has scored, fails here" in said
        assert "KeyError: 'LRL_TEST_THIS_MACHINE'" in pool.hosts.refusal and taken.poll() is None
        assert not pool.scored_by, "a trial is no response"


def test_a_host_knows_the_run_by_its_certificate(tmp_path: Path, hosts_first: None) -> None:
    cert, key = self_signed(tmp_path)
    pool = RewardPool([odd_rewards.obey], workers=1)
    with served(pool, tmp_path, endpoint=Endpoint(tls_cert=cert, tls_key=key)) as made:
        stranger = made.start_host()  # by the system's authorities
        said, _ = stranger.communicate(timeout=START_S)
        assert stranger.returncode == 2 and "certificate verify failed" in said
        made.start_host("--run_cert", cert)
        made.joined(1)
        assert scored(pool, "give 1", "give 2")[1].reward == 2.0 and "rank 0" not in pool.scored_by


def test_ctrl_c_ends_a_host_and_others_score_its_responses(tmp_path: Path, hosts_first: None) -> None:
    pool, begun = RewardPool([odd_rewards.obey], workers=1, timeout_s=60.0), tmp_path / "begun"
    with served(pool, tmp_path) as made:
        host = made.start_host()
        made.joined(1)
        workers = children(host.pid)
        scoring = Scoring(pool, f"once {begun} loop", "give 4")
        wait_for(begun.exists, START_S, "the job on the host")
        host.send_signal(signal.SIGINT)
        assert [each.reward for each in scoring.done()] == [1.0, 4.0] and counted(pool) == {"scored": 2}
        said, _ = host.communicate(timeout=START_S)
        assert host.returncode == 0 and said.endswith("reward host: ends; others score its responses.\n")
        assert all_gone(workers)


def test_a_host_without_the_module_says_so_on_both_ends_and_gets_no_job(shared: ServedPool, tmp_path: Path) -> None:
    host = shared.start_host(path=tmp_path)
    said, _ = host.communicate(timeout=START_S)
    assert host.returncode == 1 and "No module named 'odd_rewards'" in said
    refusal = shared.pool.hosts.refusal
    assert "No module named 'odd_rewards'" in refusal and "put them on its machine" in refusal
    assert refusal.startswith("Reward host ") and len(shared.pool.hosts.ready) == 1


class NoLink:
    """A connection to nowhere, which keeps what it sends."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.is_cut = self.has_ended = False

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def end(self) -> None:
        self.has_ended = True

    def cut(self) -> None:
        self.is_cut = True


SPEC = WorkerSpec(b"", ("obey",), timeout_s=1.0, memory_gib=None)
ONE = Job.of("", [("give 1", {})])


def test_a_late_answer_of_a_lost_host_is_no_outcome() -> None:
    hosts = Hosts(SPEC)
    host, _ = hosts.connect(None, "", "far", NoLink())
    hosts.hear(host, {"ready": 1})

    async def scene() -> None:
        waiting = asyncio.create_task(host.outcomes(ONE))
        await asyncio.sleep(0)
        hosts.lose(host, "it is silent")
        hosts.hear(host, {"job": 1, "outcomes": [[1.0, {"obey": 1.0}, ""]], "replaced": 0})
        with pytest.raises(HostLostError, match="silent"):
            await waiting
        with pytest.raises(HostLostError):
            await host.outcomes(ONE)

    asyncio.run(scene())
    assert hosts.ready == [] and hosts.status(0) == ("lost", "it is silent")


def test_a_host_that_answers_nothing_but_pings_is_given_up_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrl.rewards.job.START_S", 0.0)
    host = Host(0, "far", WorkerSpec(b"", ("obey",), timeout_s=0.01, memory_gib=None), NoLink())
    with pytest.raises(HostLostError, match="no outcomes from it in"):
        asyncio.run(host.outcomes(ONE))
    assert host.link.is_cut and host.in_flight == 0  # type: ignore[attr-defined]


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
    with pytest.raises(BadReportError):
        read_outcomes(values, count=1)


def test_outcomes_travel_as_they_are() -> None:
    outcomes = [Scored(0.5, {"a/b": 0.25, "c": 0.25}, "math: too much"), "timeout: obey: no reward after 1 s", None]
    assert read_outcomes(json.loads(report(7, outcomes, 0))["outcomes"], 3) == outcomes


def test_a_number_of_another_runs_host_is_not_this_runs() -> None:
    hosts = Hosts(SPEC)
    first, message = hosts.connect(hosts.claim(), "", "far", NoLink())
    run = read_welcome(json.loads(message)).run
    stranger, _ = hosts.connect(0, "another run", "elsewhere", NoLink())
    again, _ = hosts.connect(0, run, "far", NoLink())
    assert stranger.number == 1 and again.number == 0
    assert first.link.is_cut, "the connection that it has lost"  # type: ignore[attr-defined]
    hosts.lose(first, "its connection is closed")
    assert hosts.status(0) is None, "the new connection stands"
    hosts.end()
    assert again.link.has_ended and hosts.status(0) == ("ended", "")  # type: ignore[attr-defined]


def test_whoever_sends_what_no_host_sends_is_cut_off(shared: ServedPool) -> None:
    async def scene() -> None:
        headers = {"Authorization": bearer(TOKEN)}
        async with aiohttp.ClientSession(headers=headers) as session:
            for text in ("no JSON", "[1]", '{"ready": 0}', '{"job": "1"}'):
                async with session.ws_connect(shared.server.location().url + ROUTE, params={"node": "far"}) as socket:
                    await socket.receive_str()
                    await socket.send_str(text)
                    assert (await socket.receive(START_S)).type is aiohttp.WSMsgType.CLOSE

    asyncio.run(scene())
    assert len(shared.pool.hosts.ready) == 1
