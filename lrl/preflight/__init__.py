"""The checks of a run before a server starts: what needs more than one object. A class checks its
own settings in its constructor. The first fault ends the run.

`check_trainer` runs before Lightning's own checks, in the policy's `configure_callbacks`; the others
when the strategy sets up its environment, before anything starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lrl.preflight.model import check_policy
from lrl.preflight.resources import (
    check_checkpoint,
    check_data,
    check_prompts_per_step,
    check_resources,
)
from lrl.preflight.settings import check_settings, check_strategy, check_trainer

if TYPE_CHECKING:
    from lrl.run import Run

__all__ = ["check_run", "check_strategy", "check_trainer"]


def check_run(run: Run) -> None:
    """Checks a run, on rank 0; no weight is loaded, and a model that a Python function makes is made
    only if the rest is right. Raises ConfigError for the first fault."""
    policy, data = run.policy, run.data
    check_settings(run)
    read = check_data(data, run.evaluations)
    shape = check_policy(policy, data, read, run.strategy.server_settings.max_model_len)
    if run.trains:
        check_prompts_per_step(data, len(data.prompts))
    check_resources(run, shape)
    if data.resumes_from is not None:
        check_checkpoint(run, data.resumes_from, shape.trained)
