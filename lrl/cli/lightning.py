"""LightningCLI with `omegaconf+`, short errors, and a config that wins over the checkpoint, is saved
in the run's folder, and gives every logger its hyperparameters. The objects that it builds become a
run in `PolicyModule.configure_callbacks`."""

import sys
from collections.abc import Iterator
from typing import Any

import lightning as L
import yaml
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from lrl.checkpoints.run_folder import run_folder
from lrl.cli import parsing
from lrl.datamodule import RolloutDataModule
from lrl.errors import ConfigError
from lrl.policy import PolicyModule
from lrl.system.output import may_not_log
from lrl.trainer import Trainer

# Interpolations are resolved after all configs are merged (omegaconf+), relative to the subcommand.
set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
parsing.install()


class LrlCLI(LightningCLI):
    """The command line of fit and validate."""

    expected_errors = (
        *(ValueError, FileNotFoundError, MisconfigurationException),
        OmegaConfBaseException,
    )
    """Errors of bad input, shown as a message; all others keep their traceback."""

    def __init__(self) -> None:
        super().__init__(
            PolicyModule,
            RolloutDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            trainer_class=Trainer,
            # Instead of Trainer's own `auto`: settings of a strategy need its class.
            trainer_defaults={"strategy": {"class_path": parsing.DEFAULT_STRATEGY}},
            parser_class=parsing.Parser,
            parser_kwargs={"parser_mode": "omegaconf+", "allow_abbrev": False},
            save_config_callback=RunConfig,
            save_config_kwargs={"overwrite": True, "save_to_log_dir": False},
        )

    def instantiate_classes(self) -> None:
        """Builds everything; the error of a constructor is shown alone."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            from lrl.cli import settings  # only an error needs it

            raise ConfigError(settings.without_noise(str(error))) from error

    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning's own would let the checkpoint override `--model.lr` silently."""

    def _dump_config(self) -> None:
        """Writes the config without a second check, which took a sixth of the start."""
        if not hasattr(self, "config_dump"):
            text = self.parser.dump(
                self.config, skip_link_targets=False, skip_unset=False, skip_validation=True
            )
            self.config_dump = yaml.safe_load(text)[self.config.subcommand]

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Returns the requested verb, or all, each with its arguments that are no settings."""
        skip = {"model", "train_dataloaders", "val_dataloaders", "datamodule", "dataloaders"}
        verbs = dict.fromkeys(("fit", "validate"), skip)
        verb = sys.argv[1] if sys.argv[1:] else ""
        # The parser of a verb takes a tenth of the start.
        return {verb: skip} if verb in verbs else verbs


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
                logger.log_hyperparams(settings)


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
