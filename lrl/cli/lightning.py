"""LightningCLI as lrl uses it: `omegaconf+` interpolation, short errors, and a config that wins over the checkpoint."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import lightning as L
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from lrl import preflight
from lrl.callbacks import Progress
from lrl.cli import setting_errors
from lrl.datamodule import RolloutDataModule
from lrl.policy import PolicyModule
from lrl.preflight.trainer import check_strategy
from lrl.runtime import config_errors

# Interpolations are resolved after all configs are merged (omegaconf+), relative to the subcommand.
set_parsing_settings(omegaconf_absolute_to_relative_paths=True)


USUAL = ("WeightSync", "RolloutLog", "Throughput", "Health", "Progress", "Export", "Summary")
"""The callbacks of a run that names none, in their order."""


class ShortErrorParser(LightningArgumentParser):
    """An error names its setting in a few lines; the fifty lines of usage before it would hide it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong. The parser of a class within another does not: the outer one needs its message."""
        if not self.exit_on_error:
            super().error(message, ex)
        self.exit(2, f"lrl: error: {setting_errors.explained(message)}\n")


class LrlCLI(LightningCLI):
    """The command line of fit and validate."""

    expected_errors = (*config_errors.EXPECTED, MisconfigurationException)
    """What bad input raises: shown as a message. Everything else is a fault of the program and keeps its traceback."""

    def __init__(self) -> None:
        super().__init__(
            PolicyModule,
            RolloutDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=L.Trainer,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            trainer_defaults={"strategy": {"class_path": "lrl.AsyncSingleDevice"}, "log_every_n_steps": 1},
            parser_class=ShortErrorParser,
            parser_kwargs={"parser_mode": "omegaconf+", "allow_abbrev": False},
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """A run without `trainer.callbacks` has the usual ones; as a default they are shown, saved and added to."""
        parser.set_defaults({"trainer.callbacks": [{"class_path": f"lrl.callbacks.{name}"} for name in USUAL]})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """A wrong interpolation is an error of the config, not a traceback."""
        try:
            super().parse_arguments(parser, args)
            self._name_strategy(parser)
            self._refuse_settings_as_rows(parser)
        except OmegaConfBaseException as error:
            parser.error(setting_errors.of_interpolation(error))

    def _name_strategy(self, parser: LightningArgumentParser) -> None:
        """Let `strategy: lrl.AsyncSingleDevice` name a class, as all settings do; a string is Lightning's own word."""
        verb = self.config.subcommand
        strategy = self.config[verb].trainer.strategy
        if isinstance(strategy, str) and strategy not in ("auto", *StrategyRegistry.available_strategies()):
            named = {verb: {"trainer": {"strategy": {"class_path": strategy}}}}
            self.config = parser.parse_object(named, self.config)

    def _refuse_settings_as_rows(self, parser: LightningArgumentParser) -> None:
        """`--data.prompts.sorce x` misspells a setting; jsonargparse would make the row `{sorce: x}` of it."""
        if isinstance(self.config[self.config.subcommand].get("data.init_args.prompts"), list):
            stray = setting_errors.of_rows(sys.argv)
            if stray:
                parser.error(stray)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """A trainer that cannot be built does not hide what else is wrong; no rank is started for a wrong one."""
        given = self.config_init[self.subcommand].trainer
        if given.enable_progress_bar is False and given.callbacks:  # Lightning would refuse the usual callbacks for it
            kwargs["callbacks"] = [callback for callback in given.callbacks if not isinstance(callback, Progress)]
        try:
            trainer = super().instantiate_trainer(**kwargs)
            check_strategy(trainer)
            return trainer
        except self.expected_errors as error:
            config_errors.fault(str(error))
            preflight.check_without_trainer(self.model, self.datamodule)
            raise

    def _parse_ckpt_path(self) -> None:
        """Settings come from the config alone; Lightning would let the checkpoint's override `--model.lr` silently."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The verbs, and which of their arguments come from elsewhere."""
        skip = {"model", "train_dataloaders", "val_dataloaders", "datamodule", "dataloaders"}
        return {verb: skip for verb in ("fit", "validate")}
