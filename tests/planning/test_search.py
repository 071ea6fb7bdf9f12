"""Plans fit their devices, their times add up, and the search finds the best."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lrl.planning.roofline import parse_cluster, usable
from lrl.planning.search import (
    Layouts,
    Plan,
    across,
    asynchronous,
    best,
    memory_needed,
    plans_today,
    runs_today,
    split,
    synchronous,
)
from lrl.planning.workload import Workload, parse_lengths
from tests.planning.shapes import LLAMA_8B, QWEN_1_5B, shape

EIGHT = parse_cluster("8xH100")
LENGTHS = parse_lengths("lognormal:mean=1000,max=4000")
WORK = Workload(prompts=64, responses=8, prompt_tokens=512, lengths=LENGTHS)
QWEN = Layouts(shape(QWEN_1_5B), WORK)
LLAMA = Layouts(shape(LLAMA_8B), WORK)


@pytest.mark.parametrize("layouts", [QWEN, LLAMA], ids=["1.5B", "8B"])
def test_every_plan_fits_its_devices(layouts: Layouts) -> None:
    plans = [*asynchronous(layouts, EIGHT, max_lag=2), *synchronous(layouts, EIGHT)]
    assert {plan.placement for plan in plans} == {"split", "shared"}
    for plan in plans:
        assert plan.devices == 8 and plan.memory <= usable(EIGHT.device)
        assert plan.generation.generators * plan.generation.costs.tp <= plan.generation.devices
        assert plan.training.micro_batch_tokens >= WORK.longest


def test_the_step_is_the_largest_of_its_bounds() -> None:
    training, generation = QWEN.training(EIGHT, 4), QWEN.generation(EIGHT, 4, 1)
    assert training is not None and generation is not None
    slow_training = replace(training, seconds=1000.0)
    assert split(slow_training, generation, 1).bound == "training"
    sync_s = max(training.costs.sync_s, generation.costs.sync_pause_s)
    assert split(slow_training, generation, 1).step_s == pytest.approx(1000 + sync_s)
    long_response = replace(generation, writing=replace(generation.writing, span_s=3000.0))
    plan = split(training, long_response, 1)
    assert plan.bound == "longest response"
    assert plan.step_s == pytest.approx((3000 + training.last_s + plan.sync_s) / 2)
    slow_writing = replace(generation, writing=replace(generation.writing, busy_s=2000.0))
    assert split(training, slow_writing, 1).bound == "writing"
    assert split(training, slow_writing, 1, between=50.0).step_s == pytest.approx(2050)


def test_of_two_clusters_the_slower_side_uses_all_devices_and_the_other_fewer() -> None:
    few, many = parse_cluster("1xH800"), parse_cluster("64xH20")
    plan = across(QWEN, few, many, lag=1, link=10e9)
    assert plan is not None and plan.training.devices == 1 and plan.generation.devices < 64
    turned = across(QWEN, parse_cluster("64xH800"), parse_cluster("8xH20"), lag=1, link=10e9)
    assert turned is not None and turned.generation.devices == 8 and turned.training.devices < 64
    slow_link = across(QWEN, few, many, lag=1, link=1e9)
    over_it_s = 2 * QWEN.shape.parameters / 1e9
    assert slow_link is not None and slow_link.sync_s == pytest.approx(over_it_s)


def test_the_best_plans_prefer_less_lag_and_include_the_other_placement() -> None:
    plans = [*asynchronous(QWEN, EIGHT, max_lag=4), *synchronous(QWEN, EIGHT)]
    ranked: list[Plan] = best(plans, 4)
    assert len(ranked) == 4 and ranked[0].step_s <= min(plan.step_s for plan in plans) * 1.01
    assert {plan.placement for plan in ranked} == {"split", "shared"}
    close = [plan.lag for plan in plans if plan.step_s <= ranked[0].step_s]
    assert ranked[0].lag <= min(close)


def test_plans_of_today_have_whole_nodes_on_each_side_or_the_same_division_on_all_nodes() -> None:
    two_nodes = parse_cluster("16xH100")
    layouts = Layouts(shape(QWEN_1_5B), WORK, ("bf16", "fp8"))
    plans = list(plans_today(layouts, two_nodes, max_lag=2))
    assert {plan.devices for plan in plans} == {8, 16}
    assert {plan.training.devices for plan in plans if plan.devices == 8} == set(range(1, 8))
    assert {one.training.devices for one in plans if one.devices == 16} == set(range(2, 15, 2))
    state = 16 * QWEN.shape.parameters
    for plan in plans:
        both = plan.training.devices % 2 == plan.generation.generators % 2 == 0
        assert plan.devices == 8 or plan.training.devices == 8 or both
        assert runs_today(plan, two_nodes)
        assert plan.training.costs.shards in (1, plan.training.devices)
        assert plan.training.memory > state / plan.training.costs.shards
        assert plan.generation.costs.precision == "bf16"
    sharded = [plan for plan in plans if plan.training.costs.shards > 1]
    assert {plan.training.devices for plan in sharded} == {*range(2, 9), 10, 12, 14}


@pytest.mark.parametrize(("tp", "runs"), [(1, True), (2, True), (4, False)])
def test_of_tensor_parallelism_lrl_runs_two_groups_or_more(tp: int, runs: bool) -> None:
    training = next(one for one in LLAMA.trainings(EIGHT, 4) if one.costs.tp == tp)
    generation = LLAMA.generation(EIGHT, 4, 1)
    assert generation is not None and runs_today(split(training, generation, 1), EIGHT) is runs


def test_without_a_plan_of_today_the_memory_that_training_takes_is_named() -> None:
    two = parse_cluster("2xH100")
    assert not list(plans_today(LLAMA, two, max_lag=1))
    assert list(plans_today(LLAMA, parse_cluster("2xH200"), max_lag=1))
    assert {plan.training.costs.shards > 1 for plan in plans_today(LLAMA, EIGHT, 1)} == {True}
    words = "takes 13[0-9] GB of each of 1 devices, of which plans may fill 76"
    assert re.search(words, memory_needed(LLAMA, two))
