"""`Elastic` starts a generator at the right step, and ends its command with the run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lrl.callbacks import Elastic, Throughput
from lrl.callbacks.elastic import generation_s, lacks_one
from lrl.callbacks.throughput import StepTimes
from lrl.members import launchers
from tests.leftovers import wait_for

RUNS = st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 10.0), st.integers(1, 6))
"""Seconds of work for one generator; how much longer training takes than that shared evenly;
generators."""


def times_of(work: float, train: float, generators: int) -> StepTimes:
    """A step of the ideal run: the work is shared evenly, and the slower side sets the pace."""
    write = work / generators
    step = max(write, train)
    idle = {"writing": write * generators, "paused": 0.0, "starved": (step - write) * generators}
    return StepTimes({"train": train, "wait_next": step - train}, idle)


@settings(deadline=None)
@given(RUNS)
def test_one_more_is_spoken_of_exactly_if_the_slower_side_stays_the_slower_one(
    run: tuple[float, float, int],
) -> None:
    work, ratio, generators = run
    train = ratio * work / generators
    assume(abs(work / (generators + 1) - train) > 1e-6 * train)
    times = times_of(work, train, generators)
    assert generation_s(times) == pytest.approx(work / generators)
    assert lacks_one(times, generators) == (work / (generators + 1) > train)


STAYS = (
    "import signal, sys, time; open(sys.argv[1] + '/started', 'a').write('x'); {more} "
    "time.sleep(600)"
)


class ModelRun:
    """A run, as the callback sees it, with far too slow generators."""

    def __init__(self, folder: Path) -> None:
        self.throughput = Throughput()
        self.throughput.times = times_of(100.0, 1.0, 2)
        self.fleet = SimpleNamespace(rollouts=SimpleNamespace(alive=[0, 1]), joined=0)
        self.trainer: Any = SimpleNamespace(
            callbacks=[self.throughput],
            loggers=[],
            default_root_dir=str(folder),
            datamodule=SimpleNamespace(run=SimpleNamespace(fleet=self.fleet)),
        )

    def steps(self, elastic: Elastic, count: int) -> None:
        for _ in range(count):
            elastic.on_train_batch_end(self.trainer, SimpleNamespace())  # type: ignore[arg-type]


@pytest.fixture
def model_run(tmp_path: Path) -> ModelRun:
    return ModelRun(tmp_path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[psutil.Process]]:
    """Processes that callbacks have started; kills the rest at the end."""
    processes: list[psutil.Process] = []

    class Noted(launchers.subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *words: Any, **settings: Any) -> None:
            super().__init__(*words, **settings)
            processes.append(psutil.Process(self.pid))

    monkeypatch.setattr(launchers.subprocess, "Popen", Noted)
    yield processes
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def script(folder: Path, more: str = "") -> str:
    """A command that writes an x into the run's folder, and stays."""
    (folder / "stays.py").write_text(STAYS.format(more=more))
    return f"{sys.executable} {folder / 'stays.py'} {{run}}"


def test_without_a_command_the_log_says_once_what_to_type(
    model_run: ModelRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elastic = Elastic(steps=3)
    model_run.steps(elastic, 2)
    assert not caplog.text
    model_run.steps(elastic, 10)
    assert caplog.text.count(f"Type: lrl join {tmp_path}") == 1


def test_generators_are_started_one_at_a_time_up_to_the_limit(
    model_run: ModelRun, tmp_path: Path, started: list[psutil.Process]
) -> None:
    elastic = Elastic(command=script(tmp_path), max_generators=4, steps=2)
    for joined, processes in enumerate((1, 2, 2)):
        model_run.fleet.joined = joined
        model_run.fleet.rollouts.alive = list(range(2 + joined))
        model_run.steps(elastic, 20)
        assert len(started) == processes
    elastic.teardown(model_run.trainer, None, "fit")  # type: ignore[arg-type]
    assert not any(process.is_running() for process in started)


def test_a_failed_command_is_tried_again(
    model_run: ModelRun, started: list[psutil.Process], tmp_path: Path, caplog: Any
) -> None:
    program = tmp_path / "start"
    program.write_text("#!/bin/sh\necho no room >&2; exit 3")
    program.chmod(0o755)
    elastic = Elastic(command=str(program), steps=1)
    for count in (1, 2):
        model_run.steps(elastic, 1)
        assert len(started) == count
        wait_for(lambda: not elastic._started[-1].alive, 60.0, "the command")
        program.unlink(missing_ok=True)
    model_run.steps(elastic, 1)
    assert "failed with exit status 3: no room" in caplog.text
    assert "No such file" in caplog.text, "the run continues"


def test_a_command_that_does_not_end_is_killed_with_the_run(
    model_run: ModelRun, tmp_path: Path, started: list[psutil.Process], monkeypatch: Any
) -> None:
    monkeypatch.setattr(launchers, "END_S", 0.2)
    deaf = script(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN);")
    elastic = Elastic(command=deaf, steps=1)
    model_run.steps(elastic, 1)
    wait_for((tmp_path / "started").exists, 60.0, "the script")
    wait_for(lambda: started[0].status() == psutil.STATUS_SLEEPING, 60.0, "its sleep")
    started[0].send_signal(signal.SIGTERM)
    elastic.on_exception(model_run.trainer, None, KeyboardInterrupt())  # type: ignore[arg-type]
    assert not started[0].is_running()
