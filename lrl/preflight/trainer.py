"""Lightning's verbs, flags and callbacks: what would be ignored or wrong here is refused, with what does it instead.

docs/lightning.md has the table; a test holds each of its rows.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lrl.runtime.config_errors import ConfigError, fault, noting
from lrl.strategies.base import AsyncSingleDevice, GeneratorDevices
from lrl.training.schedule import check_end

if TYPE_CHECKING:
    from lrl.preflight.protocols import Policy

BY_STEPS = "A step already gathers all its micro-batches: data.micro_batch_tokens sets their size, data.groups_per_step"
NOT_A_LOSS = "every try would train on rollouts, and a step's loss says nothing about how good the policy is."
CALLBACKS: dict[type[L.Callback], str] = {
    GradientAccumulationScheduler: f"{BY_STEPS} a step's.",
    BatchSizeFinder: f"{NOT_A_LOSS} Set data.micro_batch_tokens to what fits",
    LearningRateFinder: f"{NOT_A_LOSS} Compare runs by reward or accuracy",
    StochasticWeightAveraging: "it averages by epochs, and the generators have the policy itself",
    WeightAveraging: "the generators, evaluations and checkpoints have the policy itself, not an average",
    ModelPruning: "it renames the weights, and the generators know them by their names",
    BackboneFinetuning: "it adds to the optimizer while the run goes on. Freeze weights in a PolicyModule of your own",
    OnExceptionCheckpoint: "it resumes without being asked. Every run saves at a bad end by itself",
    SpikeDetection: "it needs what training_step returns, and a step returns nothing. See lrl.callbacks.Health",
    BasePredictionWriter: "there is no trainer.predict. Ask an exported policy with `lrl chat`",
}
"""Lightning's callbacks that cannot work, and why."""


def check_verb(verb: str) -> None:
    """The trainer is asked for something that there is.

    Raises:
        ConfigError: It is not, whether faults are collected or not.
    """
    remedy = {
        "test": "Use trainer.validate with lrl.callbacks.Evaluation in trainer.callbacks: its prompts are the test set",
        "predict": "Ask an exported policy with `lrl chat FOLDER PROMPT`, or evaluate with trainer.validate",
    }.get(verb)
    if remedy is not None:
        raise ConfigError(f"trainer.{verb} has nothing to run: an lrl policy is trained and validated. {remedy}.")


def check_strategy(trainer: L.Trainer) -> None:
    """There are generators; every rank looks.

    Lightning starts the other ranks of its own strategies before anything of ours is called. They would wait for rank 0
    long after it has said what is wrong: it ends those that it has started, and any other ends by the same error.

    Raises:
        ConfigError: There are none, whether faults are collected or not.
    """
    if isinstance(trainer.strategy, GeneratorDevices):
        return
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        launcher.kill(signal.SIGKILL)
        launcher.procs.clear()  # in place: Lightning's observer reads it, and would kill this process after them
    raise ConfigError(
        f"trainer.strategy is {type(trainer.strategy).__name__}, which has no generators: use lrl.AsyncSingleDevice or "
        "lrl.AsyncDDP."
    )


def check(trainer: L.Trainer, policy: Policy) -> None:
    """Flags and callbacks of the trainer, each with the one to use."""
    _check_gradients(trainer)
    _check_precision(str(trainer.precision), policy.dtype_name)
    _check_validation(trainer)
    _check_batches(trainer)
    _check_callbacks(trainer)
    if trainer.state.fn == "fit":
        _check_second_fit(trainer)
        with noting():
            check_end(policy.schedule, trainer.max_steps)


def _refuse(flag: str, value: Any, remedy: str) -> None:
    fault(f"trainer.{flag}={value!r}: {remedy}.")


def _check_gradients(trainer: L.Trainer) -> None:
    by_policy = "the policy clips the gradient of a whole step itself. Remove it and set model.max_grad_norm"
    if trainer.gradient_clip_val:
        _refuse("gradient_clip_val", trainer.gradient_clip_val, by_policy)
    if trainer.gradient_clip_algorithm is not None:
        _refuse("gradient_clip_algorithm", trainer.gradient_clip_algorithm.value, by_policy)
    if trainer.accumulate_grad_batches != 1:
        _refuse("accumulate_grad_batches", trainer.accumulate_grad_batches, f"{BY_STEPS} a step's. Remove it")


def _check_precision(precision: str, dtype: str) -> None:
    if precision == "16-mixed":
        fault(
            "trainer.precision='16-mixed' scales the gradients, which would then be clipped at the wrong norm. "
            "Use bf16-mixed or 32-true."
        )
    elif precision in ("16-true", "64-true"):
        fault(
            f"trainer.precision={precision!r}: the weights are float32 or bfloat16. Leave it out and set model.dtype."
        )
    elif precision == "bf16-true" and dtype != "bfloat16":
        fault(f"trainer.precision='bf16-true' and model.dtype is {dtype}: the weights' type is model.dtype alone.")


def _check_validation(trainer: Any) -> None:
    """Lightning's settings of a validation loop: within fit there is none, evaluations run beside the training."""
    if trainer.fast_dev_run:
        return  # it sets them itself
    beside = "within fit, evaluations run beside the training. Remove it and set Evaluation.every_n_steps"
    seconds: float | None = trainer._val_check_time_interval
    interval = f"{seconds:g} s" if seconds is not None else trainer.val_check_interval
    if trainer.state.fn == "fit":
        if interval != 1.0:
            _refuse("val_check_interval", interval, beside)
        if trainer.check_val_every_n_epoch != 1:
            _refuse("check_val_every_n_epoch", trainer.check_val_every_n_epoch, beside)
        if trainer.num_sanity_val_steps not in (0, 2):  # 2 is Lightning's default
            _refuse("num_sanity_val_steps", trainer.num_sanity_val_steps, f"{beside}; the first one is at step 0")
    if trainer.limit_val_batches != 1.0 and not trainer.overfit_batches:
        remedy = "a batch of Lightning's would be a whole evaluation. Remove it and set `limit` of the Prompts it is of"
        _refuse("limit_val_batches", trainer.limit_val_batches, remedy)
    for flag in ("limit_test_batches", "limit_predict_batches"):
        if getattr(trainer, flag) != 1.0:
            _refuse(flag, getattr(trainer, flag), "an lrl policy is trained and validated. Remove it")


def _check_batches(trainer: Any) -> None:
    connector = trainer._accelerator_connector
    if trainer.barebones:
        remedy = "it switches off the metrics and checkpoints of a run. Remove it; lrl.callbacks.Throughput measures"
        _refuse("barebones", True, remedy)
    if trainer.overfit_batches:
        remedy = "every step has prompts and answers of its own. Remove it and set data.prompts.limit"
        _refuse("overfit_batches", trainer.overfit_batches, remedy)
    if connector._layer_sync is not None:
        _refuse("sync_batchnorm", True, "a causal language model has no batch norm. Remove it")
    if isinstance(trainer.strategy, AsyncSingleDevice) and connector._num_nodes_flag > 1:
        remedy = "lrl.AsyncSingleDevice trains in one process. Remove it, or use lrl.AsyncDDP"
        _refuse("num_nodes", connector._num_nodes_flag, remedy)


def _check_callbacks(trainer: Any) -> None:
    for callback in trainer.callbacks:
        for kind, why in CALLBACKS.items():
            if isinstance(callback, kind):
                fault(f"trainer.callbacks has {type(callback).__name__}: {why}. Remove it.")


def _check_second_fit(trainer: Any) -> None:
    """Lightning goes on counting, with a new optimizer and whatever policy is given: neither a new run nor the old."""
    resumed = getattr(trainer.datamodule, "resumes_from", None) is not None
    if trainer.global_step and not resumed:
        fault(
            f"This Trainer has fitted {trainer.global_step} steps before and would go on counting, with a new "
            "optimizer. Make a new Trainer, or continue with ckpt_path='last'."
        )
