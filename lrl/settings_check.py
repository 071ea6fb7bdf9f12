"""What must fit together for a run to learn, checked before any server starts."""

from __future__ import annotations

import lightning as L

from lrl.advantages import Advantages, GroupMean
from lrl.objectives import Objective
from lrl.reference import Reference


def check_trainer(trainer: L.Trainer) -> None:
    """Raises ValueError for a setting that would be ignored or wrong, and names the one to use."""
    if trainer.gradient_clip_val:
        raise ValueError(
            f"trainer.gradient_clip_val={trainer.gradient_clip_val}: the policy clips the gradient of a whole "
            "step itself. Remove it and set model.max_grad_norm."
        )
    if trainer.precision == "16-mixed":
        raise ValueError(
            "trainer.precision='16-mixed' scales the gradients, which would then be clipped at the wrong norm. "
            "Use bf16-mixed or 32-true."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: a step already gathers all "
            "its micro-batches. Remove it; data.micro_batch_tokens sets their size, data.groups_per_step a step's."
        )


def check_baseline(objective: Objective, advantages: Advantages) -> None:
    """Raises ValueError for a baseline under which the objective's formula is wrong."""
    if objective.needs_group_mean and not isinstance(advantages, GroupMean):
        raise ValueError(
            f"model.objective {type(objective).__name__} works on rewards less the group's mean, and data.advantages "
            f"is {type(advantages).__name__}: use lrl.GroupMean."
        )


def check_reference(objective: Objective, reference: Reference | None) -> None:
    """Raises ValueError for an objective that lacks the reference its formula uses."""
    if objective.needs_reference and reference is None:
        raise ValueError(
            f"model.objective {type(objective).__name__} needs a reference policy: set model.reference to "
            "lrl.Reference (its coefficient may stay 0)."
        )


def check_group_size(rollouts_per_group: int) -> None:
    """Raises ValueError for a group in which nothing can be compared."""
    if rollouts_per_group < 2:
        raise ValueError(
            f"data.rollouts_per_group is {rollouts_per_group}; advantages are relative to the group, so it must be "
            "at least 2."
        )


def require_weight_sync(trainer: L.Trainer) -> None:
    """Raises ValueError if nothing would ever move weights into the generators."""
    from lrl.callbacks.find import find
    from lrl.callbacks.weight_sync import WeightSync

    if find(trainer, WeightSync) is None:
        raise ValueError(
            "trainer.callbacks has no lrl.callbacks.WeightSync: the generators would answer with the first weights "
            "for ever. Add WeightSync()."
        )
