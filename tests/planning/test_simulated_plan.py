"""Simulated plans agree with the search if one side's work binds, and dispatch policies are
compared."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from lrl.planning.cluster import parse_cluster
from lrl.planning.responses import Lognormal
from lrl.planning.search import Layouts, Plan, asynchronous, synchronous
from lrl.planning.simulated_plan import DEFAULT_DISPATCH, Outcome, best_dispatch, outcomes
from lrl.planning.workload import Workload, parse_lengths
from lrl.routing.dispatch import LeastLoaded, LeastTokens, SkewnessAware
from lrl.types import Prompt
from tests.planning.shapes import QWEN_1_5B, shape

EIGHT = parse_cluster("8xH100")
WORK = Workload(
    prompts=32, responses=8, prompt_tokens=256, lengths=parse_lengths("lognormal:mean=500,max=4000")
)
LAYOUTS = Layouts(shape(QWEN_1_5B), WORK)


def planned(bound: str, lag: int) -> Plan:
    """Returns the slowest plan with this bound, which binds it clearly."""
    plans = asynchronous(LAYOUTS, EIGHT, max_lag=lag)
    found = [plan for plan in plans if (plan.bound, plan.lag) == (bound, lag)]
    return max(found, key=lambda plan: plan.step_s)


def by_policy(plan: Plan) -> dict[str, Outcome]:
    return {one.policy: one for one in outcomes(plan, WORK)}


def test_if_training_binds_the_simulator_agrees_and_the_trainer_never_waits() -> None:
    plan = planned("training", lag=3)
    found = by_policy(plan)[DEFAULT_DISPATCH]
    assert found.step_s == pytest.approx(plan.step_s, rel=0.1)
    assert sum(share for cause, share in found.waits.items() if cause != "sync") < 0.02


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_if_the_longest_response_binds_the_simulator_agrees_and_the_trainer_waits_for_it(
    lag: int,
) -> None:
    plan = planned("longest response", lag)
    found = by_policy(plan)[DEFAULT_DISPATCH]
    assert found.step_s == pytest.approx(plan.step_s, rel=0.1)
    trained_s = (1 - sum(found.waits.values())) * found.step_s
    assert trained_s == pytest.approx(plan.training.seconds, rel=0.15)
    assert sum(found.waits.values()) > 0.5 and found.waits["last"] > found.waits["sync"]
    assert all(0 <= share < 1 for share in found.waits.values()) and 0 < found.write <= 1


def test_the_simulator_agrees_with_plans_that_take_turns() -> None:
    plan = min(synchronous(LAYOUTS, EIGHT), key=lambda plan: plan.step_s)
    assert by_policy(plan)[DEFAULT_DISPATCH].step_s == pytest.approx(plan.step_s, rel=0.25)


def test_every_dispatch_policy_is_simulated_that_differs() -> None:
    plan = planned("training", lag=3)
    assert plan.generation.generators > 1
    assert set(by_policy(plan)) == {DEFAULT_DISPATCH, "RoundRobin", "LeastTokens", "SkewnessAware"}
    alone = replace(plan, generation=replace(plan.generation, generators=1))
    assert set(by_policy(alone)) == {DEFAULT_DISPATCH, "LeastTokens"}


def test_dispatch_learns_the_prompts_share_of_the_length() -> None:
    lengths = Lognormal(median=100, sigma=1.0, longest=10_000)
    prompt, many = Prompt(id=7, token_ids=[1], text=""), sorted(lengths.of(7, 7, 4001))
    assert lengths.expected(prompt) == pytest.approx(many[2000], rel=0.1)
    assert lengths.expected(prompt, written=9999.0) == 10_000.0
    assert lengths.quantile(0.5) == pytest.approx(100, abs=1)
    assert lengths.quantile(0.9) == pytest.approx(360, rel=0.02)


def test_a_recipe_gets_a_dispatch_policy_only_if_it_is_clearly_faster() -> None:
    def took(policy: str, make: type, step_s: float) -> Outcome:
        return Outcome(policy=policy, make=make, step_s=step_s, waits={}, write=1.0)

    usual = took(DEFAULT_DISPATCH, LeastLoaded, 10.0)
    assert best_dispatch([usual, took("LeastTokens", LeastTokens, 9.95)]) is None
    assert best_dispatch([usual, took("LeastTokens", LeastTokens, 9.0)]) == {
        "class_path": "lrl.routing.dispatch.LeastTokens"
    }
    chosen = best_dispatch([usual, took("SkewnessAware", SkewnessAware, 8.0)])
    assert chosen is not None and chosen["init_args"]["decode_latency"] == {
        "step_ms": 8.4,
        "response_ms": 0.056,
    }
    assert chosen["init_args"].keys() <= inspect.signature(SkewnessAware).parameters.keys()
