"""Shared by all tests: few threads, no hub, no stopwatch, and one real vLLM server that lives as
long as the session.

`make test` has three sessions beside one another, each with a server and some of the files.

A server takes many seconds to start. Every run syncs its own weights at its start, so runs of one
architecture can follow one another on one server; only the tests of starting and ending servers
start their own.
"""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Its sitecustomize.py says what for.
os.environ["PYTHONPATH"] = (
    f"{os.path.dirname(__file__)}/collector:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
)
# Each program that a test starts would compile the library again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["CXX"] = (
    "/no/compiler"  # a generator on a CPU needs none: without TORCH_COMPILE_DISABLE every request fails
)

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

# Not Lightning and transformers: the process that deals out the tests imports this file, and the
# others wait for it.
if TYPE_CHECKING:
    from tests.lent_server import LentServer

gc.disable()  # until `pytest_collection_finish`

# Without a deadline: a busy machine took 0.3 s for what takes it 7 ms. The same examples in every
# run: a rare one that fails is found with LRL_SCHEDULES or another profile, and not by chance in
# somebody's change.
settings.register_profile("untimed", deadline=None, derandomize=True)
settings.load_profile("untimed")

LONG = ("runs", "strategies", "generators")
"""Folders with the longest files, which keep the cores busy; many other tests wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spreads the files of `LONG` evenly over the first three quarters of all files.

    With all of them first, or in the order of the folders, the cores were idle for a seventh of the
    time.
    """
    files = dict.fromkeys(item.path for item in items)
    long = [path for path in files if path.parent.name in LONG]
    others = [path for path in files if path not in set(long)]
    place = {path: 0.75 * number / len(long) for number, path in enumerate(long)}
    place |= {path: number / len(others) for number, path in enumerate(others)}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """The garbage collector never looks at what imports have made: tests of settings take a seventh
    less."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_rank_of_another_run() -> Iterator[None]:
    """A test that leaves Lightning's variable has later runs of this process wait for ranks that
    nobody starts."""
    yield
    assert os.environ.pop("LOCAL_RANK", None) is None


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights: it ends a response at one token in 259, so responses are
    long."""
    from tests.tiny_policies import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def policy(policy_folder: Path) -> str:
    """The same, for a run without generators (`tests/run_without_generators.py`)."""
    return str(policy_folder)


@pytest.fixture(scope="session")
def lent_server(
    policy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LentServer]:
    """A running vLLM server of that architecture."""
    from tests.lent_server import LentServer, start_server

    server = start_server(policy_folder, tmp_path_factory.mktemp("server"))
    try:
        yield LentServer(server)
    finally:
        server.stop()


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The mark of what a test starts; waits until nothing of it is left."""
    from tests.leftovers import nothing_left
    from tests.strategies.forked_ranks import have_forkserver

    have_forkserver()
    yield from nothing_left(monkeypatch)


@pytest.fixture(scope="session")
def quickstart_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's policy before its warm-up."""
    from lrl.quickstart.warmup import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("quickstart")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Any, Any, Any]]:
    """Builds what `lrl fit` would run on the CPU; gives the trainer, the policy and the data
    module."""
    import lightning as L

    from lrl.cli.main import main

    calls: list[tuple[Any, Any, Any]] = []

    @functools.wraps(L.Trainer.fit)
    def fit(self: Any, **arguments: Any) -> None:
        calls.append((self, arguments["model"], arguments["datamodule"]))

    def run(*words: str) -> tuple[Any, Any, Any]:
        assert main(["fit", *words, "--trainer.accelerator", "cpu"]) == 0
        return calls.pop()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(L.Trainer, "fit", fit)
    monkeypatch.setattr(sys, "argv", ["lrl"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it; so it is taken back
    return run
