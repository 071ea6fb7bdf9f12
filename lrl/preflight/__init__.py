"""The checks of a run before a server starts: what needs more than one object. A class checks its
own settings in its constructor. The first fault ends the run.

`check_trainer` runs before Lightning's own checks, in the policy's `configure_callbacks`; the others
when the strategy sets up its environment, before anything starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lrl.errors import ConfigError
from lrl.preflight.data import check_data, check_monitors
from lrl.preflight.model import check_policy
from lrl.preflight.resources import check_resources
from lrl.preflight.settings import check_settings
from lrl.preflight.trainer import check_flags, check_strategy

if TYPE_CHECKING:
    import lightning as L

    from lrl.policy_model import PolicyModel
    from lrl.run import Run

__all__ = ["check_run", "check_strategy", "check_trainer"]


def check_trainer(trainer: L.Trainer, policy: PolicyModel) -> None:
    """Checks the verb, the flags and the callbacks of a trainer: what Lightning would take."""
    if trainer.state.fn in ("test", "predict"):
        raise ConfigError(
            f"trainer.{trainer.state.fn.value}: an lrl policy is trained and validated. Use "
            "trainer.validate with lrl.callbacks.Evaluation, or `lrl chat`."
        )
    if trainer.is_global_zero:
        check_flags(trainer, policy)


def check_run(run: Run) -> None:
    """Checks what needs more than one object of a run, on rank 0; no weight is loaded, and a model
    that a Python function makes is made only if the rest is right.

    Raises:
        ConfigError: Names the first fault, with its setting, value and remedy.
    """
    policy, data, evaluations = run.policy, run.data, run.evaluations
    check_settings(run)
    check_monitors(run.trainer, data, evaluations)
    read = check_data(data, evaluations)
    shape = check_policy(policy, data, read, run.strategy.server_settings.max_model_len)
    check_resources(run, shape)
    if (resumed := data.resumes_from) is not None:
        from lrl.preflight.checkpoint import check_checkpoint  # here: most runs begin anew

        check_checkpoint(run, resumed, shape)
