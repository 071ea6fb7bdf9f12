"""The division of cores between trainer and generators on a machine without a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lrl
from lrl.generators.settings import ServerSettings
from lrl.system.machine import share_cores
from tests.members.served_run import bare_run

CORES = len(os.sched_getaffinity(0))


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
    ("given", "variable", "threads"),
    [(None, None, os.cpu_count()), (None, "1", None), (3, "1", 3), (3, None, 3)],
)
def test_a_generator_that_takes_turns_with_the_trainer_has_all_cores_unless_the_user_says_so(
    given: int | None, variable: str | None, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    strategy = lrl.AsyncSingleDevice(placement="shared", server=ServerSettings(threads=given))
    assert strategy.settings_of(bare_run(strategy, Path())).threads == threads


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
