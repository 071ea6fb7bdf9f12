"""Episodes in a plan: their lengths, and how tools leave generators idle."""

from __future__ import annotations

from typing import Any

import pytest

from lrl.planning.planner.batching import GenerationPhase, drained, steady
from lrl.planning.planner.devices import parse_cluster
from lrl.planning.planner.episodes import Episodes
from lrl.planning.planner.layouts import Layouts
from lrl.planning.planner.quantiles import parse_lengths
from lrl.planning.planner.report import bottleneck, in_flight
from lrl.planning.planner.search import split
from lrl.planning.planner.workload import Workload
from tests.planning.planner.test_workload import Shared
from tests.planning.shapes import QWEN_1_5B, shape


def work(turns: str = "fixed:3", tool_ms: str | None = None, prompts: int = 32) -> Workload:
    """Returns a step of episodes with turns of 100 tokens and answers of 10."""
    episodes = Episodes(
        turns=parse_lengths(turns),
        turn_lengths=parse_lengths("fixed:100"),
        observation_tokens=10,
        tool_ms=None if tool_ms is None else parse_lengths(tool_ms),
    )
    return Workload(
        prompts=prompts,
        responses=4,
        prompt_tokens=50,
        lengths=episodes.lengths,
        episodes=episodes,
    )


def test_an_episode_has_the_tokens_of_its_turns_and_of_the_answers_between_them() -> None:
    three = work()
    assert three.lengths.values[0] == three.lengths.longest == 3 * 100 + 2 * 10
    assert three.written_share == pytest.approx(300 / 320) and three.read_tokens == 20
    spread = Episodes(
        turns=parse_lengths("lognormal:mean=3,max=8"),
        turn_lengths=parse_lengths("lognormal:mean=100,max=500"),
        observation_tokens=10,
    )
    mean = spread.turns.mean * 100 + spread.read_tokens
    assert spread.lengths.mean == pytest.approx(mean, rel=0.03)
    assert 4 * mean < spread.lengths.longest <= 8 * 500 + 7 * 10


def test_an_episode_of_one_turn_without_tools_is_a_response() -> None:
    plain = Workload(prompts=32, responses=4, prompt_tokens=50, lengths=parse_lengths("fixed:100"))
    for lag in (0, 1):
        assert phase(work("fixed:1"), lag).busy_s == pytest.approx(phase(plain, lag).busy_s)
        assert phase(work("fixed:1"), lag).span_s == pytest.approx(phase(plain, lag).span_s)


def phase(of: Workload, lag: int) -> GenerationPhase:
    return steady(Shared(), of, 2, lag) if lag else drained(Shared(), of, 2)


def test_those_in_flight_are_in_the_batch_or_at_a_tool() -> None:
    none, slow = steady(Shared(), work(), 2, 1), steady(Shared(), work(tool_ms="fixed:2000"), 2, 1)
    assert none.at_tools == 0 and none.flow_s == none.busy_s
    # 128 episodes a step, and 1.5 steps' in flight, on two generators.
    batch = 192 - slow.at_tools
    rate = 128 / slow.flow_s
    assert slow.at_tools == pytest.approx(rate * 3 * 2, rel=0.01)
    assert rate == pytest.approx(2 / (300 * (8e-3 + 1e-3 * batch / 2) / (batch / 2)), rel=0.05)
    # A smaller batch gains less from batching; the generators stay busy.
    assert slow.flow_s == slow.busy_s > none.busy_s


def test_too_few_in_flight_leave_the_generators_idle() -> None:
    few = work(tool_ms="fixed:60000", prompts=2)
    one, more = (steady(Shared(), few, 1, lag) for lag in (1, 8))
    assert one.busy_s < 0.5 * one.flow_s
    assert more.flow_s < 0.5 * one.flow_s and more.busy_s / more.flow_s > one.busy_s / one.flow_s
    # 12 in flight, each for three answers of a minute and 300 tokens.
    assert one.flow_s == pytest.approx((8 * 180 + 8 * 300 * 9e-3) / 12)


def test_on_policy_the_longest_waits_for_its_tools() -> None:
    quick, slow = (drained(Shared(), work(tool_ms=tool), 2) for tool in (None, "fixed:1000"))
    assert slow.span_s == pytest.approx(quick.span_s + 3.0) and slow.busy_s == quick.busy_s


def test_a_plan_that_tools_bind_says_so_with_the_episodes_in_flight() -> None:
    few: Any = work(tool_ms="fixed:600000", prompts=8)
    layouts, cluster = Layouts(shape(QWEN_1_5B), few), parse_cluster("8xH100")
    training, generation = layouts.training(cluster, 4), layouts.generation(cluster, 4, 4)
    assert training is not None and generation is not None
    plan = split(training, generation, 4)
    assert plan.bound == "tools" and plan.step_s > 100 and plan.generators_wait > 0.5
    assert "an episode waits 1.8e+03 s for its environment" in bottleneck(plan, few)
    assert "At most 160 episodes are in flight" in in_flight(plan, few)


def test_answers_have_tokens() -> None:
    with pytest.raises(ValueError, match="--observation-tokens is 0"):
        Episodes(
            turns=parse_lengths("fixed:2"),
            turn_lengths=parse_lengths("fixed:5"),
            observation_tokens=0,
        )
