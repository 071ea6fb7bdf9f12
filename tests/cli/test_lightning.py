"""The resolved config of `lrl fit` reaches every logger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers.logger import Logger

from lrl.cli.lightning import RunConfig

LOGGER = "tests.cli.test_lightning.Tracker"


class Tracker(Logger):
    """Stands for W&B and MLflow: keeps what it is given."""

    name, version = "tracker", "0"

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {}

    def log_hyperparams(self, params: dict[str, Any]) -> None:  # type: ignore[override]
        self.settings |= params

    def log_metrics(self, *_: Any) -> None: ...


def test_every_logger_gets_the_resolved_config_by_the_names_that_a_user_types(build: Any) -> None:
    folders = {"TensorBoardLogger": {"save_dir": "board"}, "CSVLogger": {"save_dir": "table"}}
    kinds = [*folders.items(), (LOGGER, {})]
    loggers = json.dumps([{"class_path": kind, "init_args": how} for kind, how in kinds])
    held = {"source": "data/rows.jsonl", "name": "held"}
    prompts = json.dumps({"class_path": "lrl.Prompts", "init_args": held})
    callbacks = ("--trainer.callbacks", "Evaluation", "--trainer.callbacks.prompts", prompts)
    words = ("--trainer.logger", loggers, *callbacks, "--model.lr", "3e-5")
    trainer, policy, _ = build("--config", "quickstart", *words)
    (saving,) = (one for one in trainer.callbacks if isinstance(one, RunConfig))
    saving.setup(trainer, policy, "fit")
    board, table, tracker = trainer.loggers
    saved = []
    for logger in (board, table):
        logger.save()
        saved.append(yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()))
    for settings in (tracker.settings, *saved):
        assert settings["model.lr"] == 3e-5 and settings["model"] == "lrl.PolicyModule"
        assert settings["data.groups_per_step"] == 16
        assert settings["data.stragglers"] == "wait", "defaults too"
        assert settings["trainer.callbacks.0"].endswith("Evaluation")
        assert settings["trainer.callbacks.0.prompts.name"] == "held"
        assert not [name for name in settings if "init_args" in name or "class_path" in name]
