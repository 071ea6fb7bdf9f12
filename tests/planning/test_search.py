"""Plans fit their devices and agree with the simulator, and the search finds the best."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from lrl.planning.model_shape import read_shape
from lrl.planning.roofline import parse_cluster, usable
from lrl.planning.search import Plan, Search, best
from lrl.planning.simulation import Simulation
from lrl.planning.workload import Lognormal, Workload, parse_lengths
from tests.planning.shapes import LLAMA_8B, QWEN_1_5B

EIGHT = parse_cluster("8xH100")
LENGTHS = parse_lengths("lognormal:mean=1000,max=4000")
WORK = Workload(prompts=64, responses=8, prompt_tokens=512, lengths=LENGTHS)
QWEN = Search(read_shape(QWEN_1_5B), WORK, EIGHT)
LLAMA = Search(read_shape(LLAMA_8B), WORK, EIGHT)


@pytest.mark.parametrize("search", [QWEN, LLAMA], ids=["1.5B", "8B"])
def test_every_plan_fits_its_devices(search: Search) -> None:
    for plan in search.plans(max_lag=2):
        assert 6 <= plan.devices <= 8 and plan.memory <= usable(EIGHT.device)
        assert plan.training.micro_batch_tokens >= WORK.longest


def test_the_step_is_the_largest_of_its_bounds() -> None:
    training, generation = QWEN.training(4, 4), QWEN.generation(4, 1)
    assert training is not None and generation is not None
    slow_training = replace(training, seconds=1000.0)
    assert QWEN.plan(slow_training, generation, 1).bound == "training"
    sync_s = max(training.costs.sync_s, generation.costs.sync_pause_s)
    assert QWEN.plan(slow_training, generation, 1).step_s == pytest.approx(1000 + sync_s)
    long_response = replace(generation, writing=replace(generation.writing, span_s=3000.0))
    plan = QWEN.plan(training, long_response, 1)
    assert plan.bound == "longest response"
    assert plan.step_s == pytest.approx((3000 + training.last_s + plan.sync_s) / 2)
    slow_writing = replace(generation, writing=replace(generation.writing, busy_s=2000.0))
    assert QWEN.plan(training, slow_writing, 1).bound == "writing"


@dataclass
class TheSame(Lognormal):
    """The lengths of a step's groups, the same in every step."""

    groups: list[list[int]]

    def of(self, prompt: int, index: int, responses: int) -> list[int]:
        return self.groups[index % len(self.groups)]


def simulated_step_s(plan: Plan, work: Workload) -> float:
    """Returns the seconds of a step in the simulator, once the pipeline is full."""
    drawn = work.lengths.of(work.samples).astype(int)
    by_group = drawn[(7919 * np.arange(work.samples)) % work.samples].reshape(work.prompts, -1)
    filled, training = 2 * (plan.lag + 1), plan.training
    simulation = Simulation(
        generators=[plan.generation.costs] * plan.generation.generators,
        trainer=training.costs,
        lengths=TheSame(1, 1, 1, by_group.tolist()),
        steps=filled + 4 + plan.lag,
        groups_per_step=work.prompts,
        rollouts_per_group=work.responses,
        max_lag=plan.lag,
        micro_batch_tokens=training.micro_batch_tokens
        * training.costs.devices
        // training.costs.tp,
        max_num_seqs=plan.generation.writing.slots,
        prompt_tokens=work.prompt_tokens,
    )
    steps = simulation.run().steps[filled : filled + 4]
    return sum(step.seconds for step in steps) / 4


@pytest.mark.parametrize(
    ("bound", "lag"), [("training", 3), *(("longest response", lag) for lag in (0, 1, 3))]
)
def test_the_simulator_agrees_with_plans_that_are_clearly_bound(bound: str, lag: int) -> None:
    work = replace(WORK, prompts=32, prompt_tokens=256)
    search = replace(
        QWEN, workload=replace(work, lengths=parse_lengths("lognormal:mean=500,max=4000"))
    )
    plans = [one for one in search.plans(lag) if (one.bound, one.lag) == (bound, lag)]
    plan = max(plans, key=lambda plan: plan.step_s)
    assert simulated_step_s(plan, search.workload) == pytest.approx(plan.step_s, rel=0.1)


def test_the_best_plans_prefer_less_lag() -> None:
    plans = list(QWEN.plans(max_lag=4))
    ranked = best(plans, 4)
    assert len(ranked) == 4 and ranked[0].step_s <= min(plan.step_s for plan in plans) * 1.01
    close = [plan.lag for plan in plans if plan.step_s <= ranked[0].step_s]
    assert ranked[0].lag <= min(close)


def test_plans_have_whole_nodes_on_each_side_or_the_same_division_on_all_nodes() -> None:
    plans = list(replace(QWEN, cluster=parse_cluster("16xH100")).plans(max_lag=2))
    one_node = [plan for plan in plans if plan.cluster.count == 8]
    both_nodes = [plan for plan in plans if plan.cluster.count == 16]
    assert {plan.training.costs.devices for plan in one_node} == set(range(1, 8))
    assert {plan.training.costs.devices for plan in both_nodes} >= set(range(2, 15, 2))
    state = 16 * QWEN.shape.parameters
    for plan in plans:
        trainers, shards = plan.training.costs.devices, plan.training.costs.shards
        evenly = trainers % 2 == plan.generation.generators % 2 == 0
        assert plan in one_node or evenly or trainers <= 8 and plan.generation.devices <= 8
        assert shards in (1, trainers) and plan.training.memory > state / shards
        assert shards > 1 or trainers == 1 or plan in one_node
