"""The checks of a run before a server starts: what needs more than one object. A class checks its
own settings in its constructor. The first fault ends the run.

`check_trainer` runs before Lightning's own checks, in the policy's `configure_callbacks`; the others
when the strategy sets up its environment, before anything starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lrl.preflight.data import check_checkpoint, check_data, check_monitors
from lrl.preflight.model import check_policy
from lrl.preflight.resources import check_resources
from lrl.preflight.settings import check_settings, check_strategy, check_trainer

if TYPE_CHECKING:
    from lrl.run import Run

__all__ = ["check_run", "check_strategy", "check_trainer"]


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
    if data.resumes_from is not None:
        check_checkpoint(run, data.resumes_from, shape.trained)
