"""LightningCLI with `omegaconf+` interpolation, short errors, and a config that wins over the
checkpoint."""

import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

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
from lrl.cli import bare_names, interpolation, misread, null_values, short_forms, typed_values
from lrl.cli.run_config import RunConfig
from lrl.datamodule import RolloutDataModule
from lrl.policy import PolicyModule
from lrl.system import config_errors

# Interpolations are resolved after all configs are merged (omegaconf+), relative to the subcommand.
set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
typed_values.install()
bare_names.install()

USUAL_CALLBACKS = (
    "WeightSync",
    "RolloutLog",
    "RolloutFile",
    "Throughput",
    "Health",
    "Progress",
    "Export",
    "Summary",
)
"""Callbacks of a run that names none, in their order."""


class ShortErrorParser(LightningArgumentParser):
    """Parser whose errors name the setting in a few lines, without fifty lines of usage before
    them."""

    owner: type = object
    """The class whose settings it parses; of several, the last one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exits with a short error."""
        if not self.exit_on_error:  # a nested parser: the outer one needs its message
            super().error(message, ex)
        from lrl.cli import setting_errors  # long, and only an error needs it

        self.exit(2, f"lrl: error: {setting_errors.explain(message)}\n")

    def add_class_arguments(self, *args: Any, **settings: Any) -> list[str]:
        """Adds the settings of a class; none of them is read from a file whose name is its value.

        jsonargparse would take the content of `problems.csv` for the name of a data set.
        """
        self.owner = args[0]
        return super().add_class_arguments(*args, **settings | {"sub_configs": False})

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None, **settings: Any
    ) -> Namespace:
        """Parses command-line words; for a nested class a single word, over its earlier
        settings."""
        if args and namespace:
            changed = [
                word.lstrip("-").partition(".")[0] for word in args if "." in word.partition("=")[0]
            ]
            namespace = short_forms.widen(namespace, self.owner, changed)
        return super().parse_args(args, namespace, **settings)

    def parse_object(self, obj: Any, namespace: Any = None, **settings: Any) -> Namespace:
        """Parses the settings of a config, over the settings of earlier configs."""
        if namespace:
            namespace = short_forms.widen(namespace, self.owner, short_forms.changed_in(obj))
        return super().parse_object(obj, namespace, **settings)


def check_devices(devices: Any) -> None:
    """Raises ConfigError for devices in words that Lightning does not know: its error names no
    setting."""
    if (
        isinstance(devices, str)
        and devices != "auto"
        and not re.fullmatch(r"-1|\d+|\[?\d+(, ?\d+)*,?\]?", devices)
    ):
        raise config_errors.ConfigError(
            f"trainer.devices is {devices!r}; it must be a whole number, a list of indices, as in "
            "[0, 1], or auto."
        )


def raised_by_lightning(error: Exception) -> bool:
    """Tells whether an error comes from a check of Lightning's."""
    return "/lightning/" in traceback.extract_tb(error.__traceback__)[-1].filename


def settings_in(message: str, trainer: Namespace) -> str:
    """Returns the trainer's settings whose values stand in Lightning's message, else its device
    settings."""
    named = [
        name
        for name, value in vars(trainer).items()
        if isinstance(value, str) and repr(value) in message
    ]
    shown = named or ["accelerator", "devices"]
    return ", ".join(f"trainer.{name} is {trainer[name]!r}" for name in shown)


class LrlCLI(LightningCLI):
    """The command line of fit and validate."""

    expected_errors = (*config_errors.EXPECTED, MisconfigurationException)
    """Errors of bad input, shown as a message. All others are faults of the program and keep their
    traceback."""

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
            parser_class=ShortErrorParser,
            parser_kwargs={"parser_mode": "omegaconf+", "allow_abbrev": False},
            save_config_callback=RunConfig,
            save_config_kwargs={"overwrite": True, "save_to_log_dir": False},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Sets the usual callbacks as a default, which is shown, saved and extended."""
        parser.set_defaults(
            {
                "trainer.callbacks": [
                    {"class_path": f"lrl.callbacks.{name}"} for name in USUAL_CALLBACKS
                ]
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the command line; turns wrong interpolations, class names and prompts into errors
        of the config."""
        if misplaced := misread.group_file(sys.argv):
            parser.error(misplaced)
        try:
            super().parse_arguments(parser, args)
            verb = self.config.subcommand
            if not isinstance(trainer := self.config[verb].trainer, Namespace):
                parser.error(f"trainer is {trainer!r}; it must be a mapping of settings.")
            strategy = trainer.strategy
            known = ("auto", *StrategyRegistry.available_strategies())
            if isinstance(strategy, str) and strategy not in known:
                # `strategy: AsyncSingleDevice` names a class, as all settings do; Lightning has
                # only its own words
                named = {verb: {"trainer": {"strategy": {"class_path": strategy}}}}
                self.config = parser.parse_object(named, self.config)
        except OmegaConfBaseException as error:
            parser.error(interpolation.explain(error))
        for null in null_values.find(self.config[verb]):
            parser.error(null)
        prompts = self.config[verb].get("data.init_args.prompts")
        if isinstance(prompts, list):
            from lrl.cli import setting_errors  # see `ShortErrorParser.error`

            # `--data.prompts.sorce x` misspells a setting; jsonargparse would make it the row
            # `{sorce: x}`.
            if stray := setting_errors.explain_prompt_row(sys.argv):
                parser.error(stray)
            if wrong := misread.prompts_setting(sys.argv, prompts):
                parser.error(wrong)

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            seed = self.config[self.config.subcommand].seed_everything
            raise config_errors.ConfigError(
                f"seed_everything is {seed}: {error}. Give another."
            ) from error

    def instantiate_classes(self) -> None:
        """Builds everything; the error of a constructor is shown alone."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            from lrl.cli import setting_errors  # see `ShortErrorParser.error`

            raise config_errors.ConfigError(
                setting_errors.explain_constructor(str(error))
            ) from error

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Builds the trainer; if that fails, reports the faults of policy and data with it and
        starts no rank."""
        settings = self.config_init[self.subcommand].trainer
        # Lightning would refuse it next to `Progress`.
        if settings.enable_progress_bar is False and settings.callbacks:
            kwargs["callbacks"] = [
                callback for callback in settings.callbacks if not isinstance(callback, Progress)
            ]
        try:
            check_devices(settings.devices)
            if settings.strategy in StrategyRegistry.available_strategies():
                raise config_errors.ConfigError(preflight.without_generators(settings.strategy))
            trainer = super().instantiate_trainer(**kwargs)
            preflight.check_strategy(trainer)
            return trainer
        except (*self.expected_errors, TypeError, ImportError) as error:
            if not isinstance(error, self.expected_errors) and not raised_by_lightning(error):
                raise
            if raised_by_lightning(error):
                error = config_errors.ConfigError(f"{error} ({settings_in(str(error), settings)})")
            config_errors.fault(str(error))
            preflight.check_without_trainer(self.model, self.datamodule)
            raise error

    def _parse_ckpt_path(self) -> None:
        """Does nothing: with Lightning's own, the checkpoint's settings would override `--model.lr`
        silently."""

    def _dump_config(self) -> None:
        """Writes the config as Lightning's does, without a second check of the settings, which took
        a sixth of the start."""
        if not hasattr(self, "config_dump"):
            text = self.parser.dump(
                self.config, skip_link_targets=False, skip_unset=False, skip_validation=True
            )
            self.config_dump = yaml.safe_load(text)[self.config.subcommand]

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Returns the requested verb, or all verbs, each with its arguments that are no
        settings."""
        skip = {"model", "train_dataloaders", "val_dataloaders", "datamodule", "dataloaders"}
        verbs = dict.fromkeys(("fit", "validate"), skip)
        verb = sys.argv[1] if sys.argv[1:] else ""
        # The parser of a verb takes a tenth of the start.
        return {verb: skip} if verb in verbs else verbs
