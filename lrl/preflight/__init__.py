"""All checks that are possible before a server starts, in one pass that reports every fault at
once.

The pass runs in the policy's `configure_callbacks`: the first hook that sees trainer, policy and
data, and before Lightning's own checks, whose messages do not name the setting to use. It loads no
weights, only builds shapes. A model that a Python function makes takes long, so it is made only if
the rest is right: also the prompts, where the function has its tokenizer before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.checkpoints.newest_checkpoint import steps_done
from lrl.checkpoints.run_folder import continue_logs
from lrl.preflight.datasets import check_datasets
from lrl.preflight.folders import check_folders
from lrl.preflight.monitors import check_monitors
from lrl.preflight.policy import (
    check_before_making,
    check_critic,
    check_policy,
    check_ranker,
)
from lrl.preflight.resources import check_resources
from lrl.preflight.settings import check_evaluations, check_settings
from lrl.preflight.trainer import (
    check_data,
    check_strategy,
    check_trainer,
    check_verb,
    without_generators,
)
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.strategies.graceful_shutdown import GracefulShutdown
from lrl.system.config_errors import any_noted, collected, noting
from lrl.system.slurm import requeue_signal
from lrl.training.model import is_made

if TYPE_CHECKING:
    import lightning as L

    from lrl.callbacks.evaluation import Evaluation
    from lrl.datamodule import RolloutDataModule
    from lrl.preflight.policy import Policy

__all__ = ["check", "check_strategy", "check_without_trainer", "without_generators"]


def check(trainer: L.Trainer) -> None:
    """Checks a run before it begins: all of it on rank 0, only the verb and the strategy on other
    ranks.

    Raises:
        ValueError: Names every fault, each with its setting, value and remedy.
    """
    from lrl.datamodule import RolloutDataModule

    policy: Any = trainer.lightning_module
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    ours = isinstance(data, RolloutDataModule)
    check_data(trainer)
    check_verb(trainer.state.fn.value if trainer.state.fn else "fit")
    if not trainer.is_global_zero:
        if ours:
            check_strategy(trainer)
        return
    if isinstance(trainer.strategy, GracefulShutdown):
        # Reading a data set may take long, and Lightning would exit with 1.
        trainer.strategy.signals.listen(requeue_signal(trainer))
    with collected():
        if ours:
            with noting():
                check_strategy(trainer)
        check_trainer(trainer, policy)
        if ours:
            _check_run(trainer, policy, data)


def check_without_trainer(policy: Policy, data: RolloutDataModule) -> None:
    """Notes the faults of policy and data when the trainer itself cannot be built."""
    check_datasets(data, [])
    if not _is_unmade(policy):
        check_policy(policy, data, [])


def _check_run(trainer: L.Trainer, policy: Policy, data: RolloutDataModule) -> None:
    from lrl.callbacks.base import find_all
    from lrl.callbacks.evaluation import Evaluation

    if not isinstance(trainer.strategy, GeneratorDevices):
        check_without_trainer(policy, data)
        return
    evaluations = find_all(trainer, Evaluation)
    check_settings(trainer, policy, data)
    check_evaluations(trainer, evaluations)
    if data.trains:
        check_monitors(trainer, evaluations)
    check_folders(trainer, policy)
    if data.resumes_from is not None:
        from lrl.preflight.checkpoint import check_checkpoint_path  # here: most runs begin anew

        check_checkpoint_path(data.resumes_from, trainer.strategy.resumes_parts)
    read = check_datasets(data, evaluations)
    ranker = check_ranker(data)
    if _is_unmade(policy):
        if not any_noted():
            check_before_making(policy, read)
        if any_noted():
            return
    shape = check_policy(policy, data, read, trainer.strategy.server_settings.max_model_len)
    if shape is not None:
        critic = check_critic(policy, shape)
        _check_reward_models(policy, data, evaluations)
        _check_teacher(policy, data)
        check_resources(trainer, policy, data=data, shape=shape, ranker=ranker, critic=critic)
        if data.resumes_from is not None:
            from lrl.preflight.checkpoint import check_checkpoint_contents

            check_checkpoint_contents(data.resumes_from, policy, data, shape)
    if not any_noted():
        with noting():
            trainer.strategy.claim.acquire_for(trainer)
            checkpoint = data.resumes_from if data.trains else None
            continue_logs(trainer, -1 if checkpoint is None else steps_done(Path(checkpoint)))


def _check_reward_models(
    policy: Policy, data: RolloutDataModule, evaluations: Sequence[Evaluation]
) -> None:
    """Checks the reward models of training and evaluations, if there are any."""
    rewards = list(data.reward_pool.rewards) if data.trains else []
    for evaluation in evaluations:
        rewards += evaluation.rewards_for_evaluation(data)
    if any(reward.reads_tokens for reward in rewards):
        from lrl.preflight.served_models import check_reward_models  # most runs have none

        check_reward_models(rewards, policy)


def _check_teacher(policy: Policy, data: RolloutDataModule) -> None:
    """Checks the teacher of a training that has one on a server."""
    teacher: Any = policy.reference
    if data.trains and teacher is not None and teacher.url is not None:
        from lrl.preflight.served_models import check_teacher_server  # most runs have none

        with noting():
            check_teacher_server(teacher, policy, data)


def _is_unmade(policy: Policy) -> bool:
    """Tells whether the model comes from a function that has not run yet."""
    return "policy_folder" not in vars(policy) and is_made(policy.model)
