"""Bad input gives an error of at most ten lines with setting, value and remedy, before any server
starts.

Every case changes one thing on the command line of a small run that is right in everything.

Covers lrl/preflight/model.py.
"""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lrl.cli.main import main
from lrl.generators.server import Server
from lrl.rewards import RewardPool
from lrl.system.endpoint import LOOPBACK
from tests.preflight.bad_input import CASES, HEALTHY
from tests.preflight.broken_inputs import make

Run = Callable[..., tuple[int, str]]


class ServerReached(BaseException):
    """A run reached the start of a server: it has no fault."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def run(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs `lrl` in this process, without servers; returns its exit status and the printed
    error."""

    def start(*_: object) -> None:
        raise ServerReached

    def run(*words: str) -> tuple[int, str]:
        given = [
            word.replace("{in}", str(inputs)).replace("{tmp}", str(tmp_path)) for word in words
        ]
        capfd.readouterr()
        # A run takes it out of the environment.
        monkeypatch.setenv("LRL_TOKEN", "of-this-test-and-long-enough")
        try:
            status = main(given)
        except SystemExit as end:
            status = int(end.code or 0)
        printed = capfd.readouterr().err
        assert "No step was trained" not in printed, "nobody has to hear that of a refused run"
        return status, message(printed)

    monkeypatch.setattr(Server, "start", start)
    monkeypatch.setattr(RewardPool, "start", lambda pool, loop, first=None: None)
    program = tmp_path / "lrl"
    program.touch()  # other ranks run it, and end at once
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it; so it is taken back
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(inputs)
    return run


def message(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if "error:" in line), len(lines))
    return "\n".join(lines[first:])


FIT = ("fit", "--config", "{in}/run.yaml")


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_in_a_few_lines_before_a_server_starts(case: str, run: Run) -> None:
    status, output = run(*FIT, *shlex.split(case))
    assert status == 2
    assert all(name in output for name in CASES[case]), output
    assert len(output.splitlines()) <= 5, output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_run_is_not_refused(case: str, run: Run) -> None:
    with pytest.raises(ServerReached):
        run(*FIT, *shlex.split(HEALTHY[case]))


def test_no_rank_is_started_for_a_strategy_without_generators(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher"
    monkeypatch.setattr(
        f"{launcher}._call_children_scripts", lambda self: pytest.fail("a rank was started")
    )
    status, output = run(*FIT, "--trainer.strategy", "ddp")
    assert status == 2
    assert "trainer.strategy is ddp, which has no generators" in output


def test_a_port_in_use_is_named(run: Run) -> None:
    logger = "--trainer.logger TensorBoardLogger --trainer.logger.save_dir board"
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = str(taken.getsockname()[1])
        words = (*FIT, *logger.split(), "--trainer.strategy.join_port", port)
        status, output = run(*words)
    assert status == 2 and f"join_port is {port}, which cannot be had" in output


def test_a_function_that_makes_the_model_is_not_run_while_something_else_is_wrong(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "making.py").write_text("def model():\n    raise SystemError('this takes long')\n")
    words = ("--model.model", "making:model", "--data.max_lag", "-1")
    _, output = run(*FIT, *words)
    assert "max_lag" in output and "takes long" not in output
    _, output = run(*FIT, *words[:2])
    assert "making:model" in output and "takes long" in output


def test_too_little_memory_is_an_error_with_its_parts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrl.preflight.resources.memory_here", lambda: 2**20)
    status, output = run(*FIT)
    assert status == 2 and len(output.splitlines()) <= 10
    parts = ("trainer ", "staged weights ", "generators' weights ", "keys and values 1)")
    for said in ("Memory", *parts, "there are 0.0009766", "kv_cache_gib"):
        assert said in output
