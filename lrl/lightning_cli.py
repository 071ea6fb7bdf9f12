"""LightningCLI as lrl uses it: `omegaconf+` interpolation, short errors, and a config that wins over the checkpoint."""

from __future__ import annotations

from typing import Any, NoReturn

import lightning as L
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from lrl import faults, preflight
from lrl.datamodule import RolloutDataModule
from lrl.policy import PolicyModule

# Interpolations are resolved after all configs are merged (omegaconf+), relative to the subcommand.
set_parsing_settings(omegaconf_absolute_to_relative_paths=True)


NOISE = ("Does not validate against any", "Subtypes:", "Expected a <class 'NoneType'>", "Given value", "Errors:")
"""Lines of a parser's error that only repeat how optional settings are typed."""


class ShortErrorParser(LightningArgumentParser):
    """An error names its key in a few lines; the fifty lines of usage before it would hide it."""

    def print_usage(self, file: Any = None) -> None:
        """Print nothing."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong without what every optional setting repeats."""
        super().error(without_noise(message), ex)


def without_noise(message: str) -> str:
    """A parser's message without the lines that every optional setting adds to it."""
    lines = [line for line in message.splitlines() if line.strip() and not line.strip(" -").startswith(NOISE)]
    return "\n".join(lines)


class LrlCLI(LightningCLI):
    """The command line of fit and validate."""

    expected_errors = (*faults.EXPECTED, MisconfigurationException)
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
            parser_class=ShortErrorParser,
            parser_kwargs={"parser_mode": "omegaconf+"},
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """A wrong interpolation is an error of the config, not a traceback."""
        try:
            super().parse_arguments(parser, args)
        except OmegaConfBaseException as error:
            parser.error(str(error))

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """A trainer that cannot be built does not hide what else is wrong."""
        try:
            return super().instantiate_trainer(**kwargs)
        except self.expected_errors as error:
            faults.fault(str(error))
            preflight.check_without_trainer(self.model, self.datamodule)
            raise

    def before_fit(self) -> None:
        """Let the checkpoint be checked with all else."""
        self.datamodule.resumes_from = self.config_init["fit"].ckpt_path

    def _parse_ckpt_path(self) -> None:
        """Settings come from the config alone; Lightning would let the checkpoint's override `--model.lr` silently."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The verbs, and which of their arguments come from elsewhere."""
        skip = {"model", "train_dataloaders", "val_dataloaders", "datamodule", "dataloaders"}
        return {verb: skip for verb in ("fit", "validate")}
