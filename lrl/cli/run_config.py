"""A run's config as `config.yaml` in its folder, and as every logger's hyperparameters."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from lrl.callbacks.base import find_all
from lrl.callbacks.evaluation import Evaluation
from lrl.checkpoints.run_folder import run_folder
from lrl.system.best_effort import may_not_log

REWARD = "reward/mean"


class RunConfig(SaveConfigCallback):
    """Saves the resolved config into the run's folder and logs it. Lightning's own callback would
    write it over that of the run before where a logger has one folder for all runs."""

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Saves the settings, and logs them by the names that a user types; called on rank 0."""
        path = run_folder(trainer) / self.config_filename
        path.parent.mkdir(parents=True, exist_ok=True)
        how = {"overwrite": self.overwrite, "multifile": self.multifile}
        self.parser.save(self.config, path, skip_unset=False, **how)
        text = self.parser.dump(self.config, skip_unset=False, skip_validation=True)
        settings = dict(flat(yaml.safe_load(text)))
        for logger in trainer.loggers:
            with may_not_log(logger):
                if not isinstance(logger, TensorBoardLogger):
                    logger.log_hyperparams(settings)
                    continue
                logger.log_hyperparams(settings, metrics={})  # for hparams.yaml alone
                names = [evaluation.prompts.name for evaluation in find_all(trainer, Evaluation)]
                # The first evaluation, which comes later, gives one of the two.
                means = [f"eval/{name}/{mean}" for name in names for mean in ("accuracy", "reward")]
                add_hparams(logger, settings, means)


def flat(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each setting of a config, or of its part `name`, with its whole name, without
    `class_path` and `init_args`; an element of a list, such as a callback, has its number for one."""
    if isinstance(settings, list) and any(isinstance(one, dict) for one in settings):
        settings = {str(number): one for number, one in enumerate(settings)}
    if not isinstance(settings, dict):
        yield name, settings
        return
    if "class_path" in settings:
        yield name, settings["class_path"]
        settings = settings.get("init_args") or {}
    for key, value in settings.items():
        yield from flat(value, f"{name}.{key}".lstrip("."))


def add_hparams(logger: TensorBoardLogger, settings: dict[str, Any], means: list[str]) -> None:
    """Enters a run into TensorBoard's tab HPARAMS, which shows the last value of each metric.

    Lightning's `log_hyperparams` would log a first value of each, which nobody has measured.
    """
    from torch.utils.tensorboard.summary import hparams

    plain = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in settings.items()
    }
    for summary in hparams(plain, dict.fromkeys([*means, REWARD], 0.0)):
        logger.experiment.file_writer.add_summary(summary)
