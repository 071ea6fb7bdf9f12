"""LightningCLI with `omegaconf+`, short errors, and a config that wins over the checkpoint."""

import sys
import traceback
from typing import Any

import lightning as L
import yaml
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException
from transformers.utils.logging import disable_progress_bar

from lrl import preflight
from lrl.callbacks import Progress
from lrl.cli import parsing
from lrl.cli.run_config import RunConfig
from lrl.datamodule import RolloutDataModule
from lrl.errors import ConfigError
from lrl.policy import PolicyModule
from lrl.preflight.trainer import without_generators

# Interpolations are resolved after all configs are merged (omegaconf+), relative to the subcommand.
set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
parsing.install()

USUAL_CALLBACKS = (
    *("WeightSync", "RolloutLog", "RolloutFile", "Throughput"),
    *("Health", "Progress", "Export", "Summary"),
)
"""Callbacks of a run that names none, in their order."""


class LrlCLI(LightningCLI):
    """The command line of fit and validate."""

    expected_errors = (ValueError, FileNotFoundError, MisconfigurationException)
    """Errors of bad input, shown as a message; all others keep their traceback."""

    def __init__(self) -> None:
        if not sys.stderr.isatty():
            disable_progress_bar()  # transformers' bars, which would fill a log with their steps
        super().__init__(
            PolicyModule,
            RolloutDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            trainer_defaults={
                "strategy": {"class_path": "lrl.AsyncSingleDevice"},
                "log_every_n_steps": 1,
            },
            parser_class=parsing.Parser,
            parser_kwargs={"parser_mode": "omegaconf+", "allow_abbrev": False},
            save_config_callback=RunConfig,
            save_config_kwargs={"overwrite": True, "save_to_log_dir": False},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Sets the usual callbacks as a default, which is shown, saved and extended."""
        usual = [{"class_path": f"lrl.callbacks.{name}"} for name in USUAL_CALLBACKS]
        parser.set_defaults({"trainer.callbacks": usual})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the command line; a strategy may be named without its module, as all classes."""
        try:
            super().parse_arguments(parser, args)
            verb = self.config.subcommand
            trainer = self.config[verb].get("trainer")
            if not isinstance(trainer, Namespace):  # jsonargparse takes any value for a group
                parser.error(f"trainer is {trainer!r}: give its settings.")
            strategy = trainer.get("strategy")
            known = ("auto", *StrategyRegistry.available_strategies())
            if isinstance(strategy, str) and strategy not in known:
                named = {verb: {"trainer": {"strategy": {"class_path": strategy}}}}
                self.config = parser.parse_object(named, self.config)
        except OmegaConfBaseException as error:
            parser.error(str(error))

    def instantiate_classes(self) -> None:
        """Builds everything; the error of a constructor is shown alone."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            from lrl.cli import setting_errors  # only an error needs it

            raise ConfigError(setting_errors.without_noise(str(error))) from error

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Builds the trainer; a strategy without generators starts no rank."""
        settings = self.config_init[self.subcommand].trainer
        # Lightning would refuse it next to `Progress`.
        if settings.enable_progress_bar is False and settings.callbacks:
            kept = [one for one in settings.callbacks if not isinstance(one, Progress)]
            kwargs["callbacks"] = kept
        if settings.strategy in StrategyRegistry.available_strategies():
            raise ConfigError(without_generators(settings.strategy))
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except Exception as error:
            if "/lightning/" not in traceback.extract_tb(error.__traceback__)[-1].filename:
                raise  # not from a check of Lightning's
            raise ConfigError(f"trainer: {error}") from error
        preflight.check_strategy(trainer)
        return trainer

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
