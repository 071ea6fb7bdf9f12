"""Plans in the simulator: they take what was planned where nothing but a side's work binds, and rules are compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lrl.planning.lengths import parse_lengths
from lrl.planning.planner.devices import parse_cluster
from lrl.planning.planner.layouts import Sides
from lrl.planning.planner.search import Plan, asynchronous, synchronous
from lrl.planning.planner.workload import Workload
from lrl.planning.simulator.length_sampling import Lognormal
from lrl.planning.simulator.simulated_plan import DEFAULT, ByPrompt, Outcome, best_dispatch, outcomes
from lrl.routing.dispatch import LeastLoaded, LeastTokens, SkewnessAware
from lrl.types import Prompt
from tests.planning.shapes import QWEN_1_5B, shape

EIGHT = parse_cluster("8xH100")
WORK = Workload(prompts=32, responses=8, prompt_tokens=256, lengths=parse_lengths("lognormal:mean=500,max=4000"))
SIDES = Sides(shape(QWEN_1_5B), WORK)


def planned(bound: str, lag: int) -> Plan:
    """The slowest plan with this bound: what binds it binds it clearly."""
    plans = [plan for plan in asynchronous(SIDES, EIGHT, max_lag=lag) if (plan.bound, plan.lag) == (bound, lag)]
    return max(plans, key=lambda plan: plan.step_s)


def by_rule(plan: Plan) -> dict[str, Outcome]:
    return {one.rule: one for one in outcomes(plan, SIDES, EIGHT)}


def test_where_training_binds_the_simulator_takes_as_long_and_the_trainer_waits_for_nobody() -> None:
    plan = planned("training", lag=3)
    found = by_rule(plan)[DEFAULT]
    assert found.step_s == pytest.approx(plan.step_s, rel=0.1)
    assert sum(share for cause, share in found.waits.items() if cause != "sync") < 0.02


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_where_the_longest_answer_binds_the_simulator_takes_as_long_and_the_trainer_waits_for_it(lag: int) -> None:
    plan = planned("longest answer", lag)
    found = by_rule(plan)[DEFAULT]
    assert found.step_s == pytest.approx(plan.step_s, rel=0.1)
    trained_s = (1 - sum(found.waits.values())) * found.step_s
    assert trained_s == pytest.approx(plan.training.seconds, rel=0.15)
    assert sum(found.waits.values()) > 0.5 and found.waits["last"] > found.waits["sync"]
    assert all(0 <= share < 1 for share in found.waits.values()) and 0 < found.write <= 1


def test_taking_turns_is_simulated_as_it_is_planned() -> None:
    plan = min(synchronous(SIDES, EIGHT), key=lambda plan: plan.step_s)
    assert by_rule(plan)[DEFAULT].step_s == pytest.approx(plan.step_s, rel=0.25)


def test_each_rule_is_tried_and_with_one_generator_those_that_differ_there() -> None:
    plan = planned("training", lag=3)
    assert plan.generation.generators > 1
    assert set(by_rule(plan)) == {DEFAULT, "RoundRobin", "LeastTokens", "SkewnessAware"}
    alone = replace(plan, generation=replace(plan.generation, generators=1))
    assert set(by_rule(alone)) == {DEFAULT, "LeastTokens"}


def test_a_rule_is_told_what_the_prompt_says_and_no_more() -> None:
    lengths = Lognormal(median=100, sigma=1.0, longest=10_000)
    told = ByPrompt(lengths)
    many = lengths.of(7, 7, 4001)
    assert told.expected(Prompt(id=7, token_ids=[1], text="")) == pytest.approx(sorted(many)[2000], rel=0.1)
    assert told.expected(Prompt(id=7, token_ids=[1], text=""), written=9999.0) == 10_000.0
    assert told.quantile(0.5) == pytest.approx(100, abs=1) and told.quantile(0.9) == pytest.approx(360, rel=0.02)


def test_a_recipe_gets_a_rule_only_if_it_is_worth_it() -> None:
    default, least_tokens, skewness = LeastLoaded, LeastTokens, SkewnessAware

    def took(rule: str, make: type, step_s: float) -> Outcome:
        return Outcome(rule=rule, make=make, step_s=step_s, waits={}, write=1.0)

    usual = took(DEFAULT, default, 10.0)
    assert best_dispatch([usual, took("LeastTokens", least_tokens, 9.95)]) is None
    assert best_dispatch([usual, took("LeastTokens", least_tokens, 9.0)]) == {
        "class_path": "lrl.routing.dispatch.LeastTokens"
    }
    chosen = best_dispatch([usual, took("SkewnessAware", skewness, 8.0)])
    assert chosen is not None and chosen["init_args"]["decode_latency"] == {"step_ms": 8.4, "response_ms": 0.056}
