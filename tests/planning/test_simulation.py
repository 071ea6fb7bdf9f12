"""Simulated runs keep the invariants of real runs."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.planning.costs import LinearGenerator, LinearTrainer
from lrl.planning.simulation import Forecast, Simulation
from lrl.planning.workload import Lognormal
from lrl.rollouts.timeline import GeneratorRecord, MicroBatchRecord, Record
from lrl.routing.dispatch import LeastLoaded, Request
from tests.planning import test_costs

GENERATOR = replace(test_costs.GENERATOR, kv_tokens=4000)
TRAINER = LinearTrainer(token_s=2e-4, token_squared_s=1e-8, update_s=0.1, sync_s=0.3)


class NewestFirst(LeastLoaded):
    """Another order of dispatch."""

    def order(self, request: Request) -> tuple[float, ...]:
        return (-request.priority,)


simulations = st.builds(
    Simulation,
    generators=st.integers(1, 3).map(lambda count: [GENERATOR] * count),
    trainer=st.sampled_from([TRAINER, replace(TRAINER, sync_s=0.1, pause_overlaps=True)]),
    lengths=st.builds(
        Lognormal,
        st.just(60),
        st.sampled_from([0.0, 1.0]),
        st.just(400),
        prompt_share=st.sampled_from([0.0, 0.7]),
        seed=st.integers(0, 99),
    ),
    steps=st.integers(1, 5),
    groups_per_step=st.integers(1, 6),
    rollouts_per_group=st.integers(1, 4),
    max_lag=st.integers(0, 2),
    stragglers=st.sampled_from(["wait", "mask"]),
    micro_batch_tokens=st.sampled_from([100, 1000]),
    max_num_seqs=st.integers(4, 12),
    prompt_tokens=st.just(20),
    dispatch=st.sampled_from([LeastLoaded, NewestFirst]),
)


def all_tokens(scene: Simulation) -> int:
    """Returns the tokens of all responses of a run."""
    groups = range(scene.steps * scene.groups_per_step)
    return sum(sum(scene.lengths.of(index, index, scene.rollouts_per_group)) for index in groups)


@settings(max_examples=60, deadline=None)
@given(simulations)
def test_every_response_is_trained_once_within_lag_and_slots(scene: Simulation) -> None:
    records: list[Record] = []
    forecast = scene.run(records.append)
    assert scene.run().steps == forecast.steps, "a simulation is deterministic"
    assert forecast.lags.total() == all_tokens(scene)
    assert forecast.lags.total() == sum(one.tokens for one in forecast.generators)
    if scene.stragglers == "wait":
        assert max(forecast.lags) <= scene.max_lag
    trained = sum(tokens for lag, tokens in forecast.lags.items() if lag <= scene.max_lag)
    assert sum(step.tokens for step in forecast.steps) == trained
    work = [record for record in records if isinstance(record, GeneratorRecord)]
    assert max(record.responses for record in work) <= scene.max_num_seqs
    check_parts(scene, forecast, records)


def check_parts(scene: Simulation, forecast: Forecast, records: list[Record]) -> None:
    """The parts of each step add up to the step, and those of each side to the run."""
    ended = 0.0
    for step in forecast.steps:
        waits = [step.wait_first_s, step.wait_more_s, step.wait_last_s]
        parts = [*waits, step.train_s, step.update_s, step.sync_s]
        assert sum(parts) == pytest.approx(step.seconds) and min(parts) >= 0
        assert step.started_s == pytest.approx(ended)
        if not scene.trainer.pause_overlaps:
            assert GENERATOR.sync_pause_s - 1e-9 <= step.pause_s <= step.sync_s + 1e-9
        ended += step.seconds
    for generator in forecast.generators:
        assert generator.busy_s + generator.idle_s + generator.paused_s == pytest.approx(ended)
    passes = [record.seconds for record in records if isinstance(record, MicroBatchRecord)]
    trained_s = sum(step.train_s for step in forecast.steps)
    assert sum(passes) == pytest.approx(trained_s)


@settings(max_examples=60, deadline=None)
@given(simulations, st.integers(1, 3))
def test_asynchronous_is_never_slower_than_alternating_on_the_same_split(
    scene: Simulation, max_lag: int
) -> None:
    # Costs without a fixed part per micro-batch: nothing but overlap differs.
    one = scene.generators[:1]
    scene = replace(scene, dispatch=LeastLoaded, stragglers="wait", generators=one)
    alternating = replace(scene, max_lag=0, placement="shared").run()
    asynchronous = replace(scene, max_lag=max_lag).run()
    assert asynchronous.seconds <= alternating.seconds * (1 + 1e-9)
    for step in alternating.steps:
        waited_s = step.wait_first_s + step.wait_more_s + step.wait_last_s
        assert waited_s == pytest.approx(step.generation_s), "sides that share devices take turns"


def equal_responses(**changes: Any) -> Simulation:
    """Groups of four responses of 40 tokens to a prompt of 10."""
    scene = Simulation(
        generators=[GENERATOR],
        trainer=LinearTrainer(token_s=0.125),
        lengths=Lognormal(40, 0.0, 40),
        steps=3,
        groups_per_step=2,
        rollouts_per_group=4,
        micro_batch_tokens=200,
        prompt_tokens=10,
    )
    return replace(scene, **changes)


def test_a_run_of_equal_responses_takes_the_closed_form() -> None:
    generator = LinearGenerator(kv_tokens=10**6, step_s=0.5, prefill_token_s=0.25, sync_pause_s=3.0)
    trainer = LinearTrainer(token_s=0.125, update_s=2.0, sync_s=5.0)
    scene = equal_responses(generators=[generator], trainer=trainer, max_lag=0)
    first, *_, last = scene.run().steps
    # Each of two prompts is prefilled once, all eight responses end together, and two micro-batches
    # of 200 follow.
    assert first.wait_first_s == 2 * 10 * 0.25 + 40 * 0.5
    assert (first.train_s, first.update_s) == (400 * 0.125, 2.0)
    assert (first.wait_last_s, first.sync_s, first.pause_s) == (0.0, 5.0, 3.0)
    assert last.seconds == first.seconds and last.lags == {0: 320}
    once = replace(scene, attention_tokens=5000).run().steps[0]
    assert once.train_s == 2 * (9 + 4 * 41) * 0.125, "all but a prompt's last token is read once"


@pytest.mark.parametrize(("max_lag", "sync_s"), [(1, 1.0), (0, 4.0)])
def test_an_overlapping_pause_costs_the_trainer_nothing_unless_lag_is_0(
    max_lag: int, sync_s: float
) -> None:
    generator = LinearGenerator(kv_tokens=10**6, step_s=0.001, sync_pause_s=3.0)
    trainer = LinearTrainer(token_s=0.125, sync_s=1.0, pause_overlaps=True)
    both = {"generators": [generator], "trainer": trainer}
    forecast = equal_responses(steps=4, max_lag=max_lag, **both).run()
    assert [step.sync_s for step in forecast.steps[:-1]] == pytest.approx([sync_s] * 3)
    assert forecast.steps[2].pause_s == pytest.approx(3.0)
    assert forecast.generators[0].paused_s >= 9.0
    assert forecast.steps[2].train_s == 400 * 0.125
