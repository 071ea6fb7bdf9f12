"""`Elastic` starts a generator at the right step, and ends its command with the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lrl.callbacks import Elastic, Throughput
from lrl.callbacks import elastic as elastic_module
from lrl.callbacks.elastic import generation_s, lacks_one
from lrl.callbacks.throughput import StepTimes
from tests.leftovers import living, nothing_left, wait_for

mark = pytest.fixture(nothing_left)
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


def test_without_a_command_the_log_says_once_what_to_type(
    model_run: ModelRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elastic = Elastic(steps=3)
    model_run.steps(elastic, 2)
    assert not caplog.text
    model_run.steps(elastic, 10)
    assert caplog.text.count(f"Type: lrl join {tmp_path}") == 1


def test_generators_are_started_one_at_a_time_up_to_the_limit(
    model_run: ModelRun, mark: str
) -> None:
    elastic = Elastic(command="sh -c 'sleep 600' {run}", max_generators=4, steps=2)
    for joined, processes in enumerate((1, 2, 2)):
        model_run.fleet.joined = joined
        model_run.fleet.rollouts.alive = list(range(2 + joined))
        model_run.steps(elastic, 20)
        assert len(elastic._started) == processes and living(mark)
    elastic.teardown(model_run.trainer, None, "fit")  # type: ignore[arg-type]
    wait_for(lambda: not living(mark), 60.0, "their end")


def test_a_failed_command_is_tried_again(
    model_run: ModelRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "start"
    program.write_text("#!/bin/sh\necho no room >&2; exit 3")
    program.chmod(0o755)
    elastic = Elastic(command=str(program), steps=1)
    for count in (1, 2):
        model_run.steps(elastic, 1)
        assert len(elastic._started) == count
        wait_for(lambda: not elastic._started[-1].alive, 60.0, "the command")
        program.unlink(missing_ok=True)
    model_run.steps(elastic, 1)
    assert "failed with exit status 3: no room" in caplog.text
    assert "No such file" in caplog.text, "the run continues"


def test_a_command_that_does_not_end_is_killed_with_the_run(
    model_run: ModelRun, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_module, "END_S", 0.2)
    deaf = """sh -c 'trap "" TERM; touch "$0"/deaf; sleep 600' {run}"""
    elastic = Elastic(command=deaf, steps=1)
    model_run.steps(elastic, 1)
    wait_for((tmp_path / "deaf").exists, 60.0, "the command")
    elastic.on_exception(model_run.trainer, None, KeyboardInterrupt())  # type: ignore[arg-type]
    wait_for(lambda: not living(mark), 60.0, "its end")
