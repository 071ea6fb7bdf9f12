"""Lightning's Trainer with the defaults of a run."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.strategies import Strategy

from lrl import callbacks as usual
from lrl.errors import answers_aliases
from lrl.preflight.settings import refuse_without_generators
from lrl.strategies.generator_devices import AsyncSingleDevice

USUAL_CALLBACKS = ("RolloutLog", "RolloutFile", "Health", "Progress", "Export", "Summary")


class Trainer(L.Trainer):
    """Lightning's Trainer with the defaults of a run. Lightning's own works as well, with a strategy
    of lrl's; it has only the callbacks that it is given.

    Args:
        strategy: Divides the devices between trainer and generators; `auto` is
            `lrl.AsyncSingleDevice`: one device trains, and the others generate.
        callbacks: Added to the usual ones; one of the same class replaces it.
        usual_callbacks: Whether the run has `RolloutLog`, `RolloutFile`, `Health`, `Progress`,
            `Export` and `Summary`.
        max_epochs: Passes over the prompts; -1 for no limit.
        num_sanity_val_steps: Evaluations before the first step; `lrl.callbacks.Evaluation` makes
            one by itself.
        log_every_n_steps: Optimizer steps between two rows in the loggers.
        enable_progress_bar: Whether the steps are shown; false leaves out `Progress`.
        enable_model_summary: Whether Lightning lists the modules of the model.
        **settings: See `lightning.Trainer`.
    """

    @answers_aliases
    def __init__(
        self,
        *,
        strategy: Strategy | str = "auto",  # a str first would be taken before a class of its name
        callbacks: list[L.Callback] | L.Callback | None = None,
        usual_callbacks: bool = True,
        max_epochs: int | None = -1,
        num_sanity_val_steps: int | None = 0,
        log_every_n_steps: int | None = 1,
        enable_progress_bar: bool | None = True,
        enable_model_summary: bool | None = False,
        **settings: Any,
    ) -> None:
        if strategy == "auto":
            strategy = AsyncSingleDevice()
        refuse_without_generators(strategy)
        given = [callbacks] if isinstance(callbacks, L.Callback) else list(callbacks or ())
        kinds = [getattr(usual, name) for name in USUAL_CALLBACKS if usual_callbacks]
        if enable_progress_bar is False or any(isinstance(one, ProgressBar) for one in given):
            kinds = [kind for kind in kinds if not issubclass(kind, ProgressBar)]
        missing = [kind for kind in kinds if not any(isinstance(one, kind) for one in given)]
        super().__init__(
            strategy=strategy,
            callbacks=[*given, *(kind() for kind in missing)],
            max_epochs=max_epochs,
            num_sanity_val_steps=num_sanity_val_steps,
            log_every_n_steps=log_every_n_steps,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=enable_model_summary,
            **settings,
        )
