"""Checks the result of a user's `configure_optimizers`, and steps its schedulers."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lrl.errors import ConfigError


def check_optimizers(trainer: L.Trainer) -> None:
    """Raises ValueError if lrl's training step cannot use the result of `configure_optimizers`,
    once it is set up."""
    optimizers, module = trainer.optimizers, trainer.lightning_module
    gives = f"{type(module).__name__}.configure_optimizers gives"
    if len(optimizers) != 1:
        raise ConfigError(
            f"{gives} {len(optimizers)} optimizers, and a version of the policy is one optimizer "
            "step: give one, with a parameter group for each setting."
        )
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise ConfigError(
            f"{gives} LBFGS, which computes the loss of a step many times, and rollouts are "
            "trained once: give another optimizer."
        )
    given = {id(weight) for group in optimizers[0].param_groups for weight in group["params"]}
    if any(id(weight) not in given for weight in getattr(module, "critic_weights", ())):
        raise ConfigError(
            f"{gives} no group with the weights of model.critic (`self.critic_weights`), which would "
            "learn nothing: add one."
        )
    plateaus = [
        config
        for config in trainer.lr_scheduler_configs
        if isinstance(config.scheduler, ReduceLROnPlateau)
    ]
    if plateaus and not is_overridden("lr_scheduler_step", module, L.LightningModule):
        # Lightning leaves `monitor` out of the configuration of a module that optimises by itself.
        raise ConfigError(
            f"{gives} ReduceLROnPlateau without a metric. Override lr_scheduler_step(self, "
            "scheduler, metric) and call scheduler.step(...) in it with one of "
            "self.trainer.callback_metrics, or give another scheduler."
        )


def step_schedulers(trainer: L.Trainer, batch_idx: int) -> None:
    """Steps the schedulers that are due after the optimizer step of batch `batch_idx`, as Lightning
    does by itself.

    A scheduler of interval `step` is due after every `frequency` steps, one of interval `epoch`
    (Lightning's default) after the last step of every `frequency` epochs. Call it before the hooks
    of the step: they save checkpoints.
    """
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step":
            done = trainer.global_step
        elif batch_idx + 1 == trainer.num_training_batches:
            done = trainer.current_epoch + 1
        else:
            continue
        if done % config.frequency == 0:
            trainer.lightning_module.lr_scheduler_step(config.scheduler, None)


def restart_at(
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    lrs: Sequence[float],
    settings: dict[str, Any],
) -> None:
    """Overwrites the learning rate of each parameter group, and AdamW's settings, that a checkpoint
    has restored."""
    scheduler.base_lrs = list(lrs)
    for group, factor, lr in zip(optimizer.param_groups, scheduler.lr_lambdas, lrs, strict=True):
        group.update(lr=lr * factor(scheduler.last_epoch), initial_lr=lr, **settings)
