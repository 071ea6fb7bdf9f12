"""No worker outlives its run, and Ctrl-C is left to the trainer."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pebble import ProcessPool
from pebble.pool.process import PoolManager

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # reward workers import `odd_rewards` by this name

import odd_rewards  # noqa: E402
from scenes import alive, all_gone, children, is_tracker, rollouts_of, scored  # noqa: E402

from lrl.rewards import RewardPool  # noqa: E402
from lrl.types import Prompt  # noqa: E402


def test_ctrl_c_does_not_reach_the_workers():
    pool = RewardPool([odd_rewards.obey], workers=1)
    pool.start()
    (before,) = scored(pool, "pid")
    os.kill(int(before.reward), signal.SIGINT)
    time.sleep(0.1)
    assert alive(int(before.reward)) and scored(pool, "give 1")[0].reward == 1.0
    pool.close()


def test_a_worker_imports_no_torch():
    pool = RewardPool([odd_rewards.torch_is_loaded], workers=1)
    pool.start()
    (rollout,) = scored(pool, "")
    pool.close()
    assert rollout.reward == 0.0


def test_nothing_is_left_after_close():
    before = set(children(os.getpid()))
    pool = RewardPool([odd_rewards.obey], workers=2)
    pool.start()

    async def close_while_it_loops():
        looping = asyncio.create_task(
            pool.score(Prompt(id=0, token_ids=[1], text=""), rollouts_of("loop"))
        )
        await asyncio.sleep(0.3)
        workers = set(children(os.getpid())) - before
        await asyncio.to_thread(pool.close)
        pool.close()
        with pytest.raises(RuntimeError, match="not running"):
            await looping
        return workers

    workers = asyncio.run(close_while_it_loops())
    assert len(workers) >= 2
    tracker = {pid for pid in workers if alive(pid) and is_tracker(pid)}
    assert all_gone(workers - tracker)


@pytest.mark.parametrize("order", ["give 1", "loop"])
def test_workers_die_with_a_trainer_that_is_killed(tmp_path, order):
    script = tmp_path / "trainer.py"
    script.write_text(
        "import asyncio, sys, threading, time\n"
        "from types import SimpleNamespace as Row\n"
        "from lrl.rewards import RewardPool\n"
        "from odd_rewards import obey\n"
        "def own(prompt, response, **columns):\n"
        "    return obey(prompt, response)\n"
        'if __name__ == "__main__":\n'
        "    pool = RewardPool([own], workers=2, timeout_s=60)\n"
        "    pool.start()\n"
        "    rollout = Row(text=sys.argv[1], num_tokens=1, finish_reason='stop')\n"
        "    rollout.reward_failure, rollout.judged, rollout.turn_rewards = None, None, []\n"
        "    score = lambda: asyncio.run(pool.score(Row(text='', columns={}), [rollout]))\n"
        "    threading.Thread(target=score, daemon=True).start()\n"
        "    until = time.monotonic() + (60 if sys.argv[1] == 'give 1' else 0.5)\n"
        "    while not hasattr(rollout, 'reward') and time.monotonic() < until:\n"
        "        time.sleep(0.02)\n"
        "    print(getattr(rollout, 'reward', None), flush=True)\n"
        "    time.sleep(60)\n"
    )
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    trainer = subprocess.Popen(
        [sys.executable, str(script), order],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout.readline().strip() == ("1.0" if order == "give 1" else "None")
    pids = children(trainer.pid)
    assert len(pids) >= 2
    trainer.kill()
    trainer.communicate()
    left = [] if all_gone(pids) else [pid for pid in pids if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


STALLED = (
    "import time\n"
    "from pebble import ProcessPool\n"
    "from pebble.pool.process import PoolManager\n"
    "def late(method):\n"
    "    def called(self, *args, **kwargs):\n"
    "        getattr(self, 'active', None)\n"  # as a look at it does, this starts a pool
    "        time.sleep(1)\n"
    "        return method(self, *args, **kwargs)\n"
    "    return called\n"
    "if __name__ == '__main__':\n"
    "    {cls}.schedule = late({cls}.schedule)\n"
)


OWN = "def own(prompt, response, **columns):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("before", "reward"),
    [
        ("", "GSM8K()"),
        (STALLED.format(cls="ProcessPool"), "GSM8K()"),
        (STALLED.format(cls="PoolManager"), "GSM8K()"),
        (OWN, "own"),
    ],
)
def test_a_script_without_a_main_guard_gets_an_error_that_names_it(tmp_path, before, reward):
    # A machine may stall between the start of the workers and their first job: they are dead when
    # pebble gets it.
    script = tmp_path / "trainer.py"
    script.write_text(
        f"{before}from lrl.rewards import GSM8K, RewardPool\n"
        f"pool = RewardPool([{reward}])\npool.start()\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 1
    # Behind it Python may count the semaphores of a worker that was ended while it started.
    errors = [line for line in run.stderr.splitlines() if line.startswith("lrl: error: ")]
    assert errors and all(line.endswith('under `if __name__ == "__main__":`.') for line in errors)


@pytest.mark.parametrize("when", ["before it is handed in", "while it is handed over"])
def test_a_job_that_arrives_while_all_workers_die_is_done_by_new_ones(monkeypatch, when):
    cls = ProcessPool if when == "before it is handed in" else PoolManager
    schedule, done = cls.schedule, []

    def after_their_death(self, *args, **kwargs):
        if not done:
            done.append(True)
            workers = [pid for pid in set(children(os.getpid())) - before if not is_tracker(pid)]
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            assert all_gone(workers)
            time.sleep(0.5)  # pebble looks after its workers ten times a second
        return schedule(self, *args, **kwargs)

    before = set(children(os.getpid()))
    pool = RewardPool([odd_rewards.obey], workers=2, max_failures=1.0)
    pool.start()
    monkeypatch.setattr(cls, "schedule", after_their_death)
    (rollout,) = scored(pool, "give 1")
    pool.close()
    assert rollout.reward == 1.0 and pool.counts["replaced"] == 2
