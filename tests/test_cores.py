"""How trainer and generators share the cores of a machine without a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from lrl.cores import share_cores

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def all_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(CORES)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("policy", "threads"), [("passive", CORES), ("PASSIVE", CORES), ("active", max(1, CORES // 2)), ("", CORES // 2)]
)
def test_only_threads_that_sleep_while_they_wait_may_be_on_all_cores(
    policy: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    share_cores()
    assert torch.get_num_threads() == max(1, threads)


@pytest.mark.parametrize(("policy", "cores"), [("passive", CORES), ("active", max(1, CORES // 2))])
def test_ranks_divide_the_trainers_cores(policy: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    share_cores(ranks=2)
    assert torch.get_num_threads() == max(1, cores // 2)


def test_the_users_own_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(CORES))
    share_cores()
    assert torch.get_num_threads() == CORES


def test_the_command_line_has_them_sleep_before_torch_is_there() -> None:
    look = (
        "import os, sys, lrl.cli\n"
        "class Look:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('OMP_WAIT_POLICY')); sys.stdout.flush(); os._exit(0)\n"
        "sys.meta_path.insert(0, Look())\n"
        "lrl.cli.main(['fit'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    words = [sys.executable, "-c", look]
    assert subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60).stdout == "passive\n"
