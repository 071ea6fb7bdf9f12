"""Settings that cannot work together are refused before anything starts: workers that could not join
or could not import the rewards."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import lrl
from lrl.errors import ConfigError
from lrl.members.launchers import Given
from lrl.objectives import AIPO, TBA, Objective, Tokens
from lrl.preflight.settings import check_skipping, check_worker_launcher
from lrl.rewards import GSM8K, RewardPool

TOKEN = "a-token-that-is-long-enough"


def of_the_script(prompt: str, response: str, **columns: object) -> float:
    return 1.0


def run_with(*rewards: Any) -> Any:
    pool = RewardPool(rewards)
    data = SimpleNamespace(worker_launcher=Given(1), reward_pool=pool, environment=None)
    return SimpleNamespace(strategy=lrl.AsyncSingleDevice(), data=data, trains=True)


def test_workers_that_somebody_starts_need_a_token_that_somebody_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LRL_TOKEN", raising=False)
    with pytest.raises(
        ConfigError, match=r"data.worker_launcher is Given, and LRL_TOKEN is not set.*openssl rand"
    ):
        check_worker_launcher(run_with(GSM8K()))
    monkeypatch.setenv("LRL_TOKEN", TOKEN)
    check_worker_launcher(run_with(GSM8K()))


def test_a_reward_of_the_script_that_runs_is_not_sent_to_other_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LRL_TOKEN", TOKEN)
    monkeypatch.setattr(of_the_script, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "of_the_script", of_the_script, raising=False)
    # A worker of xdist has none.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    with pytest.raises(
        ConfigError,
        match="'of_the_script', which is defined in the script that runs.*on each of them",
    ):
        check_worker_launcher(run_with(GSM8K(), of_the_script))


class Spread(Objective):
    """A user's objective that also keeps the policy from being too sure."""

    def token_losses(self, tokens: Tokens) -> Any:
        return -tokens.advantages * tokens.logprobs + 0.01 * tokens.logprobs


@pytest.mark.parametrize(
    ("objective", "reference", "cause"),
    [
        (AIPO(), None, ""),
        (Spread(), None, "model.objective Spread"),
        (AIPO(), lrl.Reference(), ""),
        (AIPO(), lrl.Reference(0.0, penalty_in="reward"), ""),
        (AIPO(), lrl.Reference(0.001), "model.reference Reference"),
        (AIPO(), lrl.Reference(0.001, "k2"), "model.reference Reference"),
        (AIPO(), lrl.Reference(0.001, "k1", "reward"), "model.reference Reference"),
        (TBA(), lrl.Reference(), "model.objective TBA"),
        (AIPO(), lrl.Teacher("any"), "model.reference Teacher"),
    ],
)
def test_groups_of_equal_rewards_are_not_skipped_where_something_else_has_a_gradient(
    objective: Objective, reference: Any, cause: str
) -> None:
    policy: Any = SimpleNamespace(objective=objective, reference=reference)
    data: Any = SimpleNamespace(max_skipped_per_step=4)
    refused = pytest.raises(ConfigError, match=f"max_skipped_per_step is 4.*{cause}.*leave it out")
    with refused if cause else nullcontext():
        check_skipping(policy, data)
    data.max_skipped_per_step = 0
    check_skipping(policy, data)
