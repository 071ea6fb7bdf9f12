"""The checks of a run before a server starts: what needs more than one object. A class checks its
own settings in its constructor. The first fault ends the run.

They run in the policy's `configure_callbacks`, the first hook that sees trainer, policy and data.
No weight is loaded; a model that a Python function makes is made only if the rest is right.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.checkpoints.newest_checkpoint import steps_done
from lrl.checkpoints.run_folder import continue_logs
from lrl.errors import ConfigError
from lrl.preflight.data import check_data, check_monitors
from lrl.preflight.model import check_policy
from lrl.preflight.resources import check_resources
from lrl.preflight.settings import check_settings
from lrl.preflight.trainer import check_flags, check_strategy
from lrl.strategies.graceful_shutdown import GracefulShutdown
from lrl.system.slurm import requeue_signal

if TYPE_CHECKING:
    import lightning as L

    from lrl.datamodule import RolloutDataModule
    from lrl.policy_model import PolicyModel

__all__ = ["check", "check_strategy"]


def check(trainer: L.Trainer) -> None:
    """Checks a run before it begins: all of it on rank 0, the strategy on every rank.

    Raises:
        ConfigError: Names the first fault, with its setting, value and remedy.
    """
    from lrl.datamodule import RolloutDataModule

    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if trainer.state.fn in ("test", "predict"):
        raise ConfigError(
            f"trainer.{trainer.state.fn.value}: an lrl policy is trained and validated. Use "
            "trainer.validate with lrl.callbacks.Evaluation, or `lrl chat`."
        )
    ours = isinstance(data, RolloutDataModule)
    if ours:
        check_strategy(trainer)
    if not trainer.is_global_zero:
        return
    if isinstance(trainer.strategy, GracefulShutdown):
        # Reading a data set may take long, and Lightning would exit with 1.
        trainer.strategy.signals.listen(requeue_signal(trainer))
    policy: Any = trainer.lightning_module
    check_flags(trainer, policy)
    if ours:
        _check_run(trainer, policy, data)


def _check_run(trainer: Any, policy: PolicyModel, data: RolloutDataModule) -> None:
    from lrl.callbacks.base import find_all
    from lrl.callbacks.evaluation import Evaluation

    evaluations = find_all(trainer, Evaluation)
    check_settings(trainer, policy, data)
    check_monitors(trainer, evaluations)
    resumed = data.resumes_from
    if resumed is not None:
        from lrl.preflight.checkpoint import (  # here: most runs begin anew
            check_contents,
            check_path,
        )

        check_path(resumed, trainer.strategy.resumes_parts)
    read = check_data(data, evaluations)
    shape = check_policy(policy, data, read, trainer.strategy.server_settings.max_model_len)
    check_resources(trainer, policy, shape)
    if resumed is not None:
        check_contents(resumed, policy, data, shape)
    trainer.strategy.claim.acquire_for(trainer)
    continues = data.trains and resumed is not None
    continue_logs(trainer, steps_done(Path(str(resumed))) if continues else -1)
