"""What a user's folder has beside a run does not take the place of lrl or of Python in its new
processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lrl.environments import Written
from lrl.environments.pool import EnvironmentPool
from lrl.errors import ConfigError
from lrl.quickstart.calculator import Calculator
from lrl.rewards import ExactMatch, RewardPool
from lrl.system.shadowed_modules import check_lrl

ROOT = Path(__file__).parents[2]
STARTING_WORKERS = """
from lrl.rewards import RewardPool

if __name__ == "__main__":
    pool = RewardPool(["rewards.py:right"], workers=1)
    pool.start()
    pool.close()
    print("a worker was ready")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a reward; the program that uses it lies elsewhere, as the command `lrl`
    does."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "program.py").write_text(STARTING_WORKERS)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rewards.py").write_text(
        "def right(prompt, response, **columns):\n    return 1.0\n"
    )
    return tmp_path / "own"


def start_workers(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder.parent / "bin" / "program.py")]
    folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    # An empty one is the current one.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_reward_workers_import_the_programs_lrl_and_python_whatever_lies_in_the_current_folder(
    folder: Path,
) -> None:
    for name in ("lrl.py", "random.py", "pebble.py", "queue.py"):
        (folder / name).write_text("raise SystemExit('of the user')\n")
    done = start_workers(folder)
    assert done.stdout == "a worker was ready\n", done.stderr


def test_a_file_that_keeps_reward_workers_from_starting_is_named(folder: Path) -> None:
    (folder / "signal.py").write_text("x = 1\n")
    done = start_workers(folder)
    assert done.returncode == 1
    # Python's own resource tracker may have the last word.
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("lrl: error: ")]
    assert f"they import {folder / 'signal.py'} in the place" in error
    assert "Rename the file" in error


def start_rewards() -> None:
    RewardPool([ExactMatch()], workers=1).start()


def start_environment() -> None:
    pool = EnvironmentPool(Calculator(), 1, turn_timeout_s=9, memory_gib=None)
    pool.start(None, Written("", []), lambda opening, reply: None)


@pytest.mark.parametrize(
    ("broken", "start"),
    [
        ("rewards.processes.Processes._new_pool", start_rewards),
        ("environments.pool.EnvironmentProcess", start_environment),
    ],
)
def test_it_is_named_too_if_a_pipe_breaks_before_a_worker_runs(
    broken: str,
    start: Callable[[], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it may on a busy machine: the process has ended before it was told what to do."""

    def breaks(*args: object) -> None:
        raise BrokenPipeError

    (folder / "signal.py").write_text("x = 1\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(f"lrl.{broken}", breaks)
    with pytest.raises(ConfigError, match=r"they import .*signal.py in the place"):
        start()


def test_a_folder_that_would_be_imported_as_lrl_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ([str(ROOT)], [str(tmp_path / "empty")], [str(tmp_path), str(ROOT)]):
        monkeypatch.setattr(sys, "path", path)
        check_lrl()
    clone = tmp_path / "lrl"
    clone.mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT)])
    check_lrl()  # a package wins over a folder without `__init__.py`
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match=f"Worker processes would import {clone} as lrl"):
        check_lrl()
    (clone / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT)])
    with pytest.raises(ValueError, match=f"Worker processes would import {clone} as lrl"):
        check_lrl()
