"""A worker that hangs, dies or is killed costs what it was at fault for, and no worker outlives its
run: real processes, real deaths. Here they score groups; a worker that plays episodes is the same.

Covers lrl/workers/worker.py.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lrl.workers.worker import ask_this_machine_itself
from tests.event_loop import LOOP, run
from tests.leftovers import lives
from tests.rewards import odd_rewards
from tests.rewards.scenes import PROMPT, rollouts_of, scored, started
from tests.workers.jobs import pid_of

ROOT = Path(__file__).parents[2]
REWARDS = [odd_rewards.obey]


@pytest.fixture(scope="module")
def pool():
    with started(REWARDS, workers=1, timeout_s=60.0, max_failures=1.0) as pool:
        yield pool


def works(pool):
    return scored(pool, "give 1")[0].reward == 1.0


def test_an_idle_worker_that_is_killed_is_replaced_at_once_and_is_no_failure(pool):
    assert works(pool)
    before = pool.counts["replaced"]
    os.kill(pid_of(pool.workers), signal.SIGKILL)
    began = time.monotonic()
    assert works(pool) and pool.counts["replaced"] == before + 1
    assert time.monotonic() - began < 30, "no deadline had to pass"


def test_a_worker_that_is_stopped_is_replaced_after_its_deadlines():
    with started(REWARDS, workers=1, timeout_s=1.0) as pool:
        assert works(pool)
        os.kill(pid_of(pool.workers), signal.SIGSTOP)
        assert works(pool) and pool.counts["replaced"] == 1


@pytest.mark.parametrize(
    ("change", "why", "found"),
    [
        ({"code": b""}, "data.rewards cannot be loaded in a worker: EOFError", "cannot be loaded"),
        ({"start_timeout_s": 0.01}, "it was not ready after 0.01 s", "lost"),
    ],
)
def test_a_worker_that_cannot_start_again_says_why_at_each_replacement(
    pool, change, why, found, monkeypatch, caplog
):
    assert works(pool)
    local = pool.workers.local
    monkeypatch.setattr(local, "spec", replace(local.spec, **change))
    os.kill(pid_of(pool.workers), signal.SIGKILL)
    failures = [scored(pool, "give 1")[0].reward_failure or "" for _ in range(2)]
    assert any(found in each for each in failures)
    assert f"A worker of data.rewards is replaced: {why}" in caplog.text


def test_ctrl_c_does_not_reach_the_workers(pool):
    assert works(pool)
    pid = pid_of(pool.workers)
    os.kill(pid, signal.SIGINT)
    assert works(pool) and pid_of(pool.workers) == pid


def test_nothing_is_left_after_close_and_who_waits_gets_to_know():
    with started(REWARDS, workers=1, timeout_s=60.0) as pool:
        inner = psutil.Process(pid_of(pool.workers))
        both = [inner, psutil.Process(inner.ppid())]
        waits = LOOP.submit(pool.score(PROMPT, rollouts_of("loop")))
        time.sleep(0.3)
        pool.close()
        pool.close()
        with pytest.raises(RuntimeError, match="not running|the run has ended"):
            waits.result(60.0)
        assert not any(map(lives, both))
        pool.start(LOOP)
        assert works(pool), "it starts again"


def test_the_loop_disconnects_a_killed_worker_before_the_garbage_collector_can():
    with started(REWARDS, workers=1) as pool:
        (worker,) = pool.workers.local._processes
        _, connection = worker._streams.result()

        async def disconnects():
            worker.kill("of a test")
            await asyncio.sleep(0)
            return connection.is_closing()

        assert run(disconnects())


def test_a_worker_that_is_not_ready_in_time_is_named_with_the_setting():
    words = r"data.rewards was ready after data\.worker_start_timeout_s=0\.001\. .*or raise it"
    with pytest.raises(TimeoutError, match=words), started(REWARDS, start_timeout_s=0.001):
        pass


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, ("127.0.0.1", "127.0.0.1")),
        ({"NO_PROXY": ".corp"}, (".corp,127.0.0.1", ".corp,127.0.0.1")),
        ({"no_proxy": "a", "NO_PROXY": "b"}, ("a,127.0.0.1", "b,127.0.0.1")),
        ({"no_proxy": "*"}, ("*", "*")),
    ],
)
def test_what_no_proxy_names_stays(before, after, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, before.get(name, ""))
    ask_this_machine_itself()
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == after


OWN = "def own(prompt, response, **columns):\n    return 1.0\n"
STARTS = """
from lrl.rewards import GSM8K, RewardPool
from lrl.system.event_loop import LoopThread
RewardPool([{reward}]).start(LoopThread())
"""


@pytest.mark.parametrize(
    ("program", "typed"),
    [
        (STARTS.format(reward="GSM8K()"), False),
        (OWN + STARTS.format(reward="own"), False),
        (OWN + STARTS.format(reward="own"), True),
    ],
)
def test_a_script_without_a_guard_and_a_reward_typed_in_a_notebook_are_named_with_the_remedy(
    tmp_path, program, typed
):
    script = tmp_path / "trainer.py"
    script.write_text(program)
    ran = subprocess.run(
        [sys.executable, *(["-c", program] if typed else [str(script)])],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1
    if typed:
        assert "'own'" in ran.stderr and "%%writefile my_rewards.py" in ran.stderr
        return
    errors = [line for line in ran.stderr.splitlines() if line.startswith("lrl: error: ")]
    assert errors and all(line.endswith('under `if __name__ == "__main__":`.') for line in errors)
