"""The plans that lrl can run, and the nearest cluster where there is none."""

from __future__ import annotations

import re

import pytest

from lrl.planning.planner.devices import parse_cluster
from lrl.planning.planner.layouts import Layouts
from lrl.planning.planner.runnable_today import plans_today, runs_today, why_none
from lrl.planning.planner.search import split
from tests.planning.planner.test_search import EIGHT, LLAMA, QWEN, WORK
from tests.planning.shapes import QWEN_1_5B, shape


def test_plans_of_today_have_whole_nodes_on_each_side_or_the_same_division_on_all_nodes() -> None:
    two_nodes = parse_cluster("16xH100")
    plans = list(
        plans_today(Layouts(shape(QWEN_1_5B), WORK, ("bf16", "fp8")), two_nodes, max_lag=2)
    )
    assert {plan.devices for plan in plans} == {8, 16}
    assert {plan.training.devices for plan in plans if plan.devices == 8} == set(range(1, 8))
    assert {plan.training.devices for plan in plans if plan.devices == 16} == {
        2,
        4,
        6,
        8,
        10,
        12,
        14,
    }
    for plan in plans:
        both = plan.training.devices % 2 == plan.generation.generators % 2 == 0
        assert plan.devices == 8 or plan.training.devices == 8 or both
    state = 16 * QWEN.shape.parameters
    for plan in plans:
        assert runs_today(plan, two_nodes)
        assert plan.training.costs.shards in (1, plan.training.devices)
        assert (
            plan.training.memory > state / plan.training.costs.shards
            and plan.generation.costs.precision == "bf16"
        )
    sharded = [plan for plan in plans if plan.training.costs.shards > 1]
    assert {plan.training.devices for plan in sharded} == {*range(2, 9), 10, 12, 14}


@pytest.mark.parametrize(("tp", "runs"), [(1, True), (2, True), (4, False)])
def test_of_tensor_parallelism_lrl_runs_two_groups_or_more(tp: int, runs: bool) -> None:
    training = next(one for one in LLAMA.trainings(EIGHT, 4) if one.costs.tp == tp)
    generation = LLAMA.generation(EIGHT, 4, 1)
    assert generation is not None and runs_today(split(training, generation, 1), EIGHT) is runs


def test_without_a_plan_of_today_the_nearest_cluster_is_named() -> None:
    two = parse_cluster("2xH100")
    assert not list(plans_today(LLAMA, two, max_lag=1)) and list(
        plans_today(LLAMA, parse_cluster("2xH200"), 1)
    )
    assert {plan.training.costs.shards > 1 for plan in plans_today(LLAMA, EIGHT, 1)} == {True}
    text = why_none(LLAMA, two, max_lag=1)
    assert re.search(
        "takes 13[0-9] GB of each device that trains, .* and 76 of a device of 2xH100 are free",
        text,
    )
    assert (
        "The nearest cluster that can is 2xH200" in text
        and "at most about 4.5 billion parameters" in text
    )
    alone = parse_cluster("1xH200")
    assert "no device left for generators" in why_none(
        LLAMA, alone, max_lag=1
    ) and "1xB200" in why_none(LLAMA, alone, 1)
