"""A worker that hangs, dies or is killed costs what it was at fault for, and no worker outlives its
run; the same for a group to score and for an episode. Real processes, real deaths.

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
from tests.leftovers import lives, wait_for
from tests.workers.jobs import KINDS, REWARDS, done, pid_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=KINDS)
def shared(request):
    made = request.param()
    made.pool.start(LOOP)
    yield made
    made.pool.close()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_an_idle_worker_that_is_killed_is_replaced_at_once_and_is_no_failure(shared):
    assert done(shared, "fine") == [""]
    before = shared.replaced
    os.kill(pid_of(shared.pool.workers), signal.SIGKILL)
    began = time.monotonic()
    assert done(shared, "fine") == [""]
    assert time.monotonic() - began < 30, "no deadline had to pass"
    assert shared.replaced == before + 1


def test_a_worker_that_is_stopped_is_replaced_after_its_deadlines(kind):
    jobs = kind(timeout_s=1.0)
    jobs.pool.start(LOOP)
    try:
        assert done(jobs, "fine") == [""]
        os.kill(pid_of(jobs.pool.workers), signal.SIGSTOP)
        assert done(jobs, "fine") == [""] and jobs.replaced == 1
    finally:
        jobs.pool.close()


@pytest.mark.parametrize(
    ("change", "why", "found"),
    [
        ({"code": b""}, "{setting} cannot be loaded in a worker: EOFError", "cannot be loaded"),
        ({"start_timeout_s": 0.01}, "it was not ready after 0.01 s", "lost"),
    ],
)
def test_a_worker_that_cannot_start_again_says_why_at_each_replacement(
    kind, change, why, found, caplog
):
    jobs = kind()
    jobs.pool.start(LOOP)
    local = jobs.pool.workers.local
    try:
        local.spec = replace(local.spec, **change)
        os.kill(pid_of(jobs.pool.workers), signal.SIGKILL)
        failures = done(jobs, "fine", "fine")
    finally:
        jobs.pool.close()
    assert any(found in each for each in failures)
    said = f"A worker of {jobs.setting} is replaced: {why.format(setting=jobs.setting)}"
    assert said in caplog.text


def test_ctrl_c_does_not_reach_the_workers(shared):
    assert done(shared, "fine") == [""]
    pid = pid_of(shared.pool.workers)
    os.kill(pid, signal.SIGINT)
    assert done(shared, "fine") == [""] and pid_of(shared.pool.workers) == pid


def test_nothing_is_left_after_close_and_who_waits_gets_to_know(kind):
    jobs = kind(timeout_s=60.0)
    jobs.pool.start(LOOP)
    inner = psutil.Process(pid_of(jobs.pool.workers))
    both = [inner, psutil.Process(inner.ppid())]

    async def close_while_it_hangs():
        waits = asyncio.create_task(jobs.do("hang"))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(jobs.pool.close)
        jobs.pool.close()
        try:
            why = await waits
        except RuntimeError as error:
            why = str(error)
        assert "not running" in why or "the run has ended" in why

    run(close_while_it_hangs())
    assert not any(map(lives, both))
    jobs.pool.start(LOOP)
    assert done(jobs, "fine") == [""], "it starts again"
    jobs.pool.close()


TRAINER = """
import time
from tests.event_loop import LOOP
from tests.workers.jobs import KINDS, pid_of
if __name__ == "__main__":
    for jobs in [kind(timeout_s=60) for kind in KINDS]:
        jobs.pool.start(LOOP)
        LOOP.submit(jobs.do("hang"))
        time.sleep(0.5)
        print(pid_of(jobs.pool.workers), flush=True)
    time.sleep(60)
"""


def test_workers_die_with_a_trainer_that_is_killed(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(REWARDS)])},
        stdout=subprocess.PIPE,
    )
    assert trainer.stdout is not None
    workers = [psutil.Process(int(trainer.stdout.readline())) for _ in KINDS]
    started = [*workers, *(worker.parent() for worker in workers)]
    trainer.kill()
    trainer.communicate()
    wait_for(lambda: not any(lives(one) for one in started if one), 60.0, "the end of the workers")


def test_a_worker_that_is_not_ready_in_time_is_named_with_the_setting(kind):
    jobs = kind(start_timeout_s=0.001)
    words = rf"{jobs.setting} was ready after data\.worker_start_timeout_s=0\.001\. .*or raise it"
    with pytest.raises(TimeoutError, match=words):
        jobs.pool.start(LOOP)


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
