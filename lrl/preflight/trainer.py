"""Refusals of Lightning's flags and callbacks that would be ignored or wrong.

docs/lightning.md has the table; each row has a test.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lrl.callbacks.evaluation import Evaluation
from lrl.errors import ConfigError
from lrl.strategies.generator_devices import AsyncSingleDevice, GeneratorDevices
from lrl.training.schedule import check_end

if TYPE_CHECKING:
    from lrl.policy_model import PolicyModel

STEP_SIZE = "data.micro_batch_tokens and data.groups_per_step set the sizes of a step"
NO_LOSS = "the loss of a step says nothing about how good the policy is"
CALLBACKS: dict[type[L.Callback], str] = {
    callbacks.GradientAccumulationScheduler: STEP_SIZE,
    callbacks.BatchSizeFinder: f"{NO_LOSS}. Set data.micro_batch_tokens to what fits",
    callbacks.LearningRateFinder: f"{NO_LOSS}. Compare runs by reward or accuracy",
    callbacks.StochasticWeightAveraging: "the generators have the policy itself, not an average",
    callbacks.WeightAveraging: "the generators have the policy itself, not an average",
    callbacks.ModelPruning: "it renames weights, and generators know them by their names",
    callbacks.BackboneFinetuning: "freeze weights in a PolicyModule of your own",
    callbacks.OnExceptionCheckpoint: "every run saves at a bad end by itself",
    callbacks.SpikeDetection: "it reads a loss that no step returns. See lrl.callbacks.Health",
}
"""Lightning's callbacks that cannot work, and the reason."""
PRECISIONS = ("32-true", "bf16-mixed")
"""The precisions that leave torch's default dtype as it is."""


def check_strategy(trainer: L.Trainer) -> None:
    """Checks, on every rank, that the strategy has generators."""
    if isinstance(trainer.strategy, GeneratorDevices):
        return
    # Lightning starts the other ranks of its own strategies before any hook of ours; they would
    # wait for rank 0 long after its error, and so would the next run of a script.
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        # Here: a run of one rank needs nothing of several.
        from lrl.strategies.several_ranks import forget_place

        launcher.kill(signal.SIGKILL)
        forget_place(launcher)
        launcher.procs.clear()  # in place: Lightning's observer reads it, and would kill this process after them
    raise ConfigError(without_generators(type(trainer.strategy).__name__))


def without_generators(strategy: str) -> str:
    """Returns the error about a strategy of Lightning's own."""
    return (
        f"trainer.strategy is {strategy}, which has no generators: use lrl.AsyncSingleDevice, "
        "lrl.AsyncDDP or lrl.AsyncFSDP."
    )


def check_flags(trainer: Any, policy: PolicyModel) -> None:
    """Checks the flags and callbacks of the trainer."""
    for flag, value, allowed, remedy in _flags(trainer):
        if value not in allowed:
            raise ConfigError(f"trainer.{flag}={value!r}: {remedy}.")
    check_precision(str(trainer.precision))
    for callback in trainer.callbacks:
        for kind, reason in CALLBACKS.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise ConfigError(f"trainer.callbacks has {name}: {reason}. Remove it.")
    if trainer.state.fn != "fit":
        if not any(isinstance(one, Evaluation) for one in trainer.callbacks):
            raise ConfigError("trainer.validate runs lrl.callbacks.Evaluation, and there is none.")
        return
    if trainer.global_step and getattr(trainer.datamodule, "resumes_from", None) is None:
        raise ConfigError(
            f"This Trainer has fitted {trainer.global_step} steps before and would go on counting, "
            "with a new optimizer. Make a new Trainer, or continue with ckpt_path='last'."
        )
    check_end(policy.schedule, trainer.max_steps)


def _flags(trainer: Any) -> Iterator[tuple[str, Any, tuple[Any, ...], str]]:
    """Yields flags of the trainer, each with its value, the allowed values, and the remedy."""
    clips = "set model.max_grad_norm, which clips the gradient of a whole step"
    yield "gradient_clip_val", trainer.gradient_clip_val, (None, 0), clips
    yield "accumulate_grad_batches", trainer.accumulate_grad_batches, (1,), STEP_SIZE
    yield "overfit_batches", trainer.overfit_batches, (0,), "set data.prompts.limit"
    if isinstance(trainer.strategy, AsyncSingleDevice):
        nodes = trainer._accelerator_connector._num_nodes_flag
        yield "num_nodes", nodes, (1,), "use lrl.AsyncDDP"
    if trainer.state.fn == "fit" and not trainer.fast_dev_run:  # which sets them itself
        evaluates = "evaluations run beside the training: set Evaluation.every_n_steps"
        seconds: float | None = trainer._val_check_time_interval
        interval = trainer.val_check_interval if seconds is None else f"{seconds:g} s"
        yield "val_check_interval", interval, (1.0,), evaluates
        yield "check_val_every_n_epoch", trainer.check_val_every_n_epoch, (1,), evaluates


def check_precision(precision: str) -> None:
    """Checks that log-probs, lengths and gradients are float32, and unscaled."""
    if precision not in PRECISIONS:
        raise ConfigError(
            f"trainer.precision={precision!r}: log-probs, lengths and gradients must be float32. Use "
            "bf16-mixed, or leave it out (32-true) and set model.dtype=bfloat16."
        )
    if (default := torch.get_default_dtype()) != torch.float32:
        raise ConfigError(
            f"torch's default dtype is {default}, in which a step would compute log-probs and "
            "lengths. Leave torch.set_default_dtype out, and set model.dtype."
        )
