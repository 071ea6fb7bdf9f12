"""The division of cores between trainer and generators on a machine without a GPU, and the pinning of
real processes with several threads."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import lrl
from lrl.generators.settings import ServerSettings
from lrl.strategies.generator_servers import server_settings
from lrl.system.cpu_affinity import CpuPinning, cores_of_generators, share_cores
from lrl.system.event_loop import LoopThread
from tests.generators.test_server import Scripted
from tests.scripted_run import ScriptedRun, let_requests_succeed

EVERY = os.sched_getaffinity(0)
SOME = {max(EVERY)}
TWO_THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""
CORES = len(EVERY)
two_cores = pytest.mark.skipif(len(EVERY) < 2, reason="there is nothing to share")


@pytest.fixture(autouse=True)
def all_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(CORES)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("variables", "ranks", "threads"),
    [
        ({"OMP_WAIT_POLICY": "PASSIVE"}, 1, CORES),
        ({"OMP_WAIT_POLICY": ""}, 1, CORES // 2),
        ({"OMP_WAIT_POLICY": "passive"}, 2, CORES // 2),
        ({"OMP_WAIT_POLICY": "active"}, 2, CORES // 2 // 2),
        ({"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "7"}, 1, CORES),
    ],
)
def test_only_threads_that_sleep_while_they_wait_may_be_on_all_cores_which_ranks_divide(
    variables: dict[str, str], ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    share_cores(ranks)
    assert torch.get_num_threads() == max(1, threads)


@pytest.mark.parametrize(
    ("cores", "threads", "found"),
    [
        ([2, 3, 6, 7], [1, 1], [6, 7]),
        ([2, 3, 6], [None], [3, 6]),
        ([2, 3, 6, 7], [None, None], []),
        ([2, 3, 6, 7], [3], []),
        ([5], [None], []),
    ],
)
def test_generators_are_pinned_to_the_other_half_of_the_cores_if_they_fit_there(
    cores: list[int], threads: list[int | None], found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cores))
    assert cores_of_generators(threads) == found
    for name, value in {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert cores_of_generators(threads) == [], "beside a trainer on all cores"


@pytest.mark.parametrize(
    ("given", "variable", "threads"),
    [(None, None, os.cpu_count()), (None, "1", None), (3, "1", 3), (3, None, 3)],
)
def test_a_generator_that_takes_turns_with_the_trainer_has_all_cores_unless_the_user_says_so(
    given: int | None, variable: str | None, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    strategy = lrl.AsyncSingleDevice(placement="shared", server=ServerSettings(threads=given))
    run: Any = SimpleNamespace(
        strategy=strategy,
        policy=SimpleNamespace(dtype_name="float32"),
        data=SimpleNamespace(max_model_tokens=64),
    )
    assert server_settings(run).threads == threads


@two_cores
def test_while_a_trainer_computes_generators_and_the_loop_leave_it_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    let_requests_succeed(monkeypatch)
    strategy = ScriptedRun(Scripted, tmp_path, ServerSettings(threads=1))
    before = os.sched_getaffinity(0)
    data = lrl.RolloutDataModule([{"prompt": "1", "answer": "1"}], [lrl.rewards.GSM8K()])
    others = set(sorted(before)[CORES // 2 :])
    run = strategy.run_with(data)

    def cores() -> list[set[int]]:
        """Returns the cores of the generator and of the loop."""
        (server,) = [one.server for one in run.fleet.generators]
        supervisor = psutil.Process(server._supervisor.pid)
        (generator,) = supervisor.children()
        (loop,) = [one for one in threading.enumerate() if one.name == "lrl-loop"]
        return [os.sched_getaffinity(number) for number in (generator.pid, loop.native_id or 0)]

    async def look_after_a_while() -> list[set[int]]:
        end = time.monotonic() + 60
        while (found := cores()) != [before, before] and time.monotonic() < end:
            await asyncio.sleep(0.1)
        return found

    try:
        run.start()
        assert cores() == [others, others]
        assert run.fleet.call(look_after_a_while(), "a long wait") == [before, before]
        assert cores() == [others, others] and os.sched_getaffinity(0) == before
    finally:
        run.end()


def test_the_command_line_lets_waiting_threads_sleep_before_torch_is_imported() -> None:
    look = (
        "import os, sys, lrl.cli.main\n"
        "class Look:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('OMP_WAIT_POLICY')); sys.stdout.flush(); os._exit(0)\n"
        "sys.meta_path.insert(0, Look())\n"
        "lrl.cli.main.main(['fit'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    words = [sys.executable, "-c", look]
    assert (
        subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300).stdout
        == "passive\n"
    )


@pytest.fixture
def program() -> Iterator[psutil.Popen]:
    with psutil.Popen([sys.executable, "-c", TWO_THREADS], stdout=subprocess.PIPE) as started:
        started.stdout.readline()
        yield started
        started.kill()


@pytest.fixture
def thread() -> Iterator[int]:
    """A thread of this process."""
    loop = LoopThread()
    yield loop.thread
    loop.close()


def cores(process: psutil.Process) -> list[set[int]]:
    return [os.sched_getaffinity(one.id) for one in process.threads()]


@two_cores
def test_every_thread_is_pinned_except_in_an_unpinned_block(
    program: psutil.Popen, thread: int
) -> None:
    pinning = CpuPinning(SOME, thread)
    pinning.set_processes(0, [program])
    pinning.pin()
    assert cores(program) == [SOME, SOME] and os.sched_getaffinity(thread) == SOME
    with pytest.raises(KeyboardInterrupt), pinning.unpinned():
        assert cores(program) == [EVERY, EVERY] and os.sched_getaffinity(thread) == EVERY
        raise KeyboardInterrupt
    assert cores(program) == [SOME, SOME] and os.sched_getaffinity(thread) == SOME
    assert os.sched_getaffinity(threading.main_thread().native_id or 0) == EVERY


@two_cores
def test_a_process_that_has_ended_or_was_replaced_is_passed_over(
    program: psutil.Popen, thread: int
) -> None:
    ended = psutil.Popen([sys.executable, "-c", ""])
    ended.wait()
    pinning = CpuPinning(SOME, thread)
    pinning.set_processes(0, [program])
    pinning.set_processes(0, [ended])
    pinning.pin()
    assert cores(program) == [EVERY, EVERY] and os.sched_getaffinity(thread) == SOME


@two_cores
def test_a_machine_without_pinning_is_logged_once_and_the_run_continues(
    thread: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*words: object) -> None:
        raise PermissionError("not allowed")

    pinning = CpuPinning(SOME, thread)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    for _ in range(2):
        pinning.pin()
    assert caplog.text.count("not allowed") == 1
