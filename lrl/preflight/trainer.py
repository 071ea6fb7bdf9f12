"""Refusals of Lightning's verbs, flags and callbacks that would be ignored or wrong, each with its
replacement.

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

from lrl.errors import ConfigError
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.strategies.single_device import AsyncSingleDevice
from lrl.system.config_errors import fault, noting
from lrl.training.schedule import check_end

if TYPE_CHECKING:
    from lrl.preflight.policy import Policy

STEP_SIZE_REMEDY = (
    "A step already gathers all its micro-batches: data.micro_batch_tokens sets their size, "
    "data.groups_per_step"
)
LOSS_IS_NO_MEASURE = (
    "every try would train on rollouts, and a step's loss says nothing about how good the policy "
    "is."
)
PRECISIONS = ("32-true", "bf16-mixed")
"""The precisions that leave torch's default dtype as it is."""
CALLBACKS: dict[type[L.Callback], str] = {
    callbacks.GradientAccumulationScheduler: f"{STEP_SIZE_REMEDY} a step's.",
    callbacks.BatchSizeFinder: f"{LOSS_IS_NO_MEASURE} Set data.micro_batch_tokens to what fits",
    callbacks.LearningRateFinder: f"{LOSS_IS_NO_MEASURE} Compare runs by reward or accuracy",
    callbacks.StochasticWeightAveraging: (
        "it averages by epochs, and the generators have the policy itself"
    ),
    callbacks.WeightAveraging: (
        "the generators, evaluations and checkpoints have the policy itself, not an average"
    ),
    callbacks.ModelPruning: "it renames the weights, and the generators know them by their names",
    callbacks.BackboneFinetuning: (
        "it adds to the optimizer later. Freeze weights in a PolicyModule of your own"
    ),
    callbacks.OnExceptionCheckpoint: (
        "it resumes without being asked. Every run saves at a bad end by itself"
    ),
    callbacks.SpikeDetection: (
        "it reads the loss of training_step, which returns none. See lrl.callbacks.Health"
    ),
    callbacks.BasePredictionWriter: (
        "there is no trainer.predict. Prompt an exported policy with `lrl chat`"
    ),
}
"""Lightning's callbacks that cannot work, and the reason."""


def check_verb(verb: str) -> None:
    """Raises ConfigError at once for a verb of the trainer without an lrl meaning."""
    remedy = {
        "test": (
            "Use trainer.validate with lrl.callbacks.Evaluation in trainer.callbacks: its prompts "
            "are the test set"
        ),
        "predict": (
            "Prompt an exported policy with `lrl chat FOLDER PROMPT`, or evaluate with "
            "trainer.validate"
        ),
    }.get(verb)
    if remedy is not None:
        raise ConfigError(
            f"trainer.{verb} has nothing to run: an lrl policy is trained and validated. {remedy}."
        )


def check_data(trainer: Any) -> None:
    """Raises ConfigError at once for a trainer that got the policy alone."""
    source = trainer.fit_loop._data_source
    if trainer.state.fn == "fit" and trainer.datamodule is None and not source.is_defined():
        raise ConfigError(
            "trainer.fit has got no data: give a lrl.RolloutDataModule as its `datamodule`."
        )


def check_strategy(trainer: L.Trainer) -> None:
    """Checks on every rank that the strategy has generators.

    Raises:
        ConfigError: It has none; raised at once, even while faults are collected.
    """
    if isinstance(trainer.strategy, GeneratorDevices):
        return
    # Lightning starts the other ranks of its own strategies before any hook of ours. They would
    # wait for rank 0 long after its error: it kills the ranks that it started, and others end by
    # the same error.
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


def check_trainer(trainer: Any, policy: Policy) -> None:
    """Checks the flags and callbacks of the trainer."""
    for flag, value, allowed, remedy in _flags(trainer):
        if value not in allowed:
            fault(f"trainer.{flag}={value!r}: {remedy}.")
    check_precision(str(trainer.precision))
    for callback in trainer.callbacks:
        for reason in (why for kind, why in CALLBACKS.items() if isinstance(callback, kind)):
            fault(f"trainer.callbacks has {type(callback).__name__}: {reason}. Remove it.")
    if trainer.state.fn == "fit":
        if trainer.global_step and getattr(trainer.datamodule, "resumes_from", None) is None:
            fault(
                f"This Trainer has fitted {trainer.global_step} steps before and would go on "
                "counting, with a new optimizer. Make a new Trainer, or continue with "
                "ckpt_path='last'."
            )
        with noting():
            check_end(policy.schedule, trainer.max_steps)


def _flags(trainer: Any) -> Iterator[tuple[str, Any, tuple[Any, ...], str]]:
    """Yields flags of the trainer, each with its value, the allowed values, and the remedy for
    others."""
    connector = trainer._accelerator_connector
    algorithm = trainer.gradient_clip_algorithm
    by_policy = (
        "the policy clips the gradient of a whole step itself. Remove it and set "
        "model.max_grad_norm"
    )
    yield "gradient_clip_val", trainer.gradient_clip_val, (None, 0), by_policy
    yield "gradient_clip_algorithm", algorithm and algorithm.value, (None,), by_policy
    yield (
        "accumulate_grad_batches",
        trainer.accumulate_grad_batches,
        (1,),
        f"{STEP_SIZE_REMEDY} a step's. Remove it",
    )
    remedy = (
        "it switches off the metrics and checkpoints of a run. Remove it; lrl.callbacks.Throughput "
        "measures"
    )
    yield "barebones", trainer.barebones, (False,), remedy
    remedy = "every step has its own prompts and responses. Remove it and set data.prompts.limit"
    yield "overfit_batches", trainer.overfit_batches, (0,), remedy
    remedy = "a causal language model has no batch norm. Remove it"
    yield "sync_batchnorm", connector._layer_sync is not None, (False,), remedy
    if isinstance(trainer.strategy, AsyncSingleDevice):
        remedy = "lrl.AsyncSingleDevice trains in one process. Remove it, or use lrl.AsyncDDP"
        yield "num_nodes", connector._num_nodes_flag, (1,), remedy
    if trainer.fast_dev_run:
        return  # it sets the flags below
    if trainer.state.fn == "fit":
        remedy = (
            "within fit, evaluations run during the training. Remove it and set "
            "Evaluation.every_n_steps"
        )
        seconds: float | None = trainer._val_check_time_interval
        interval = trainer.val_check_interval if seconds is None else f"{seconds:g} s"
        yield "val_check_interval", interval, (1.0,), remedy
        yield "check_val_every_n_epoch", trainer.check_val_every_n_epoch, (1,), remedy
        remedy += "; the first one is at step 0"
        # 2 is Lightning's default.
        yield (
            "num_sanity_val_steps",
            trainer.num_sanity_val_steps,
            (0, 2),
            remedy,
        )
    if not trainer.overfit_batches:  # which sets it
        remedy = (
            "a batch of Lightning's would be a whole evaluation. Remove it and set `limit` of the "
            "Prompts"
        )
        yield "limit_val_batches", trainer.limit_val_batches, (1.0,), remedy
    for flag in ("limit_test_batches", "limit_predict_batches"):
        yield (
            flag,
            getattr(trainer, flag),
            (1.0,),
            "an lrl policy is trained and validated. Remove it",
        )


def check_precision(precision: str) -> None:
    """Checks that log-probs, lengths and gradients are float32, and unscaled, and the weights in
    `model.dtype`."""
    if precision == "16-mixed":
        fault(
            "trainer.precision='16-mixed' scales the gradients, which would then be clipped at the "
            "wrong norm. Use bf16-mixed or 32-true."
        )
    elif precision not in PRECISIONS:
        fault(
            f"trainer.precision={precision!r} makes all that a step computes of one type, also "
            "log-probs, and the lengths of responses (bfloat16 has no number between 256 and 258). "
            "Use bf16-mixed, or leave it out (32-true) and set model.dtype=bfloat16."
        )
    if (default := torch.get_default_dtype()) != torch.float32:
        fault(
            f"torch's default dtype is {default}, in which a step would compute log-probs and "
            "lengths. Leave torch.set_default_dtype out, and set model.dtype."
        )
