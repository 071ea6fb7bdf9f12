"""The resolved config of `lrl fit` reaches every logger; no server is started."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger

from lrl.cli.main import main
from lrl.run import Run
from lrl.system.endpoint import LOOPBACK
from tests.preflight import broken_inputs
from tests.tiny_policies import tiny_llama

LOGGER = "tests.cli.test_lightning.Tracker"


class Reached(BaseException):
    """The run has come to the start of its generators."""


class Tracker(Logger):
    """Stands for W&B and MLflow: keeps what it is given."""

    name, version = "tracker", "0"

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {}

    def log_hyperparams(self, params: dict[str, Any]) -> None:  # type: ignore[override]
        self.settings |= params

    def log_metrics(self, *_: Any) -> None: ...


@pytest.fixture(autouse=True)
def in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a policy, data and a config; no worker is started."""
    tiny_llama(tmp_path / "models/whole")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").write_text(broken_inputs.as_lines(broken_inputs.ROWS))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(broken_inputs.run(tmp_path)))
    monkeypatch.setattr("lrl.rewards.RewardPool.start", lambda pool, *given: None)
    monkeypatch.chdir(tmp_path)


def test_a_run_whose_port_is_in_use_is_refused_before_a_server_starts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["--trainer.logger.class_path", "TensorBoardLogger"]
    words += ["--trainer.logger.init_args.save_dir", "board"]
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["fit", "--config", "run.yaml", *words, "--trainer.strategy.join_port", port])
    said = capfd.readouterr().err
    assert f"join_port is {port}, which cannot be had" in said
    assert "No step was trained" not in said, "nobody has to hear that of a run that is refused"


def test_every_logger_gets_the_resolved_config_by_the_names_that_a_user_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[L.Trainer] = []

    def start(run: Run) -> None:
        found.append(run.trainer)
        raise Reached

    monkeypatch.setattr("lrl.run.Run.start", start)
    monkeypatch.setattr(sys, "argv", [shutil.which("true") or "true"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    folders = {"TensorBoardLogger": {"save_dir": "board"}, "CSVLogger": {"save_dir": "table"}}
    kinds = [*folders.items(), (LOGGER, {})]
    loggers = json.dumps([{"class_path": kind, "init_args": how} for kind, how in kinds])
    held = {"source": "data/rows.jsonl", "name": "held"}
    prompts = json.dumps({"class_path": "lrl.Prompts", "init_args": held})
    words = ("--trainer.logger", loggers, "--trainer.callbacks+", "Evaluation")
    words = (*words, "--trainer.callbacks.prompts", prompts, "--model.lr", "3e-5")
    with pytest.raises(Reached):
        main(["fit", "--config", "run.yaml", *words])
    board, table, tracker = found[0].loggers
    assert isinstance(board, TensorBoardLogger) and isinstance(table, CSVLogger)
    assert isinstance(tracker, Tracker)
    saved = []
    for logger in (board, table):
        logger.save()
        saved.append(yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()))
    for settings in (tracker.settings, *saved):
        assert settings["model.lr"] == 3e-5 and settings["model"] == "lrl.PolicyModule"
        assert settings["data.groups_per_step"] == 4
        assert settings["data.max_lag"] == 1, "defaults too"
        assert settings["trainer.callbacks.1"].endswith("Evaluation")
        assert settings["trainer.callbacks.1.prompts.name"] == "held"
        assert not [name for name in settings if "init_args" in name or "class_path" in name]
