"""Everything that can be checked before a server starts, in one pass that reports all faults at once.

The pass runs in the policy's `configure_callbacks`, the first hook in which trainer, policy and data stand side by side
and before Lightning's own checks, whose messages do not name the setting to use. Nothing heavy is done: of the model
only its shapes are built. What takes long by itself, a model made by a Python function, waits until the rest is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lrl.preflight import inputs, resources, resume, run_folder, settings
from lrl.preflight import trainer as trainers
from lrl.runtime import config_errors
from lrl.runtime.run_folder import run_folder as run_folder_of
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.strategies.graceful_shutdown import GracefulShutdown
from lrl.training.model import is_made

if TYPE_CHECKING:
    import lightning as L

    from lrl.datamodule import RolloutDataModule
    from lrl.preflight.protocols import Policy


def check(trainer: L.Trainer) -> None:
    """Check a run that is about to begin; once, on rank 0, and of any other rank what concerns it alone.

    Raises:
        ValueError: Names every fault, each with its setting, value and remedy.
    """
    from lrl.datamodule import RolloutDataModule

    policy: Any = trainer.lightning_module
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    trainers.check_verb(trainer.state.fn or "fit")
    if not trainer.is_global_zero:
        if isinstance(data, RolloutDataModule):
            trainers.check_strategy(trainer)
        return
    if isinstance(trainer.strategy, GracefulShutdown):
        trainer.strategy.signals.listen()  # reading a data set may take long, and Lightning would exit with 1
    with config_errors.collected():
        if isinstance(data, RolloutDataModule):
            with config_errors.noting():
                trainers.check_strategy(trainer)
        trainers.check(trainer, policy)
        if isinstance(data, RolloutDataModule):
            _check_run(trainer, policy, data)


def check_without_trainer(policy: Policy, data: RolloutDataModule) -> None:
    """What can be said about policy and data when the trainer itself cannot be built; faults are only noted."""
    inputs.check_rows(data, [])
    if not _makes_its_model(policy):
        inputs.check_policy(policy, data, [])


def _check_run(trainer: L.Trainer, policy: Policy, data: RolloutDataModule) -> None:
    from lrl.callbacks.base import find_all
    from lrl.callbacks.evaluation import Evaluation

    if not isinstance(trainer.strategy, GeneratorDevices):
        check_without_trainer(policy, data)
        return
    evaluations = find_all(trainer, Evaluation)
    settings.check_run(trainer, policy, data)
    settings.check_evaluations(trainer, evaluations)
    run_folder.check(trainer, policy)
    resume.check_path(data.resumes_from)
    read = inputs.check_rows(data, evaluations)
    ranker = inputs.check_ranker(data)
    if _makes_its_model(policy) and config_errors.any_noted():
        return
    shape = inputs.check_policy(policy, data, read)
    if shape is not None:
        resources.check(trainer, policy, data, shape, ranker)
        resume.check_contents(data.resumes_from, policy, data, shape)
    if not config_errors.any_noted():
        with config_errors.noting():
            trainer.strategy.claim.acquire(run_folder_of(trainer))


def _makes_its_model(policy: Policy) -> bool:
    """Whether the model is made by a function that has not been run yet."""
    return "policy_folder" not in vars(policy) and is_made(policy.model)
