"""Simulated episodes: the real loop, with a model of their environment."""

from dataclasses import replace
from typing import Any

import pytest

from lrl.planning.costs import LinearGenerator, LinearTrainer
from lrl.planning.profiling.timeline import GeneratorRecord, GroupRecord, Record
from lrl.planning.simulator.episode_model import Answer, DrawnEpisodes, ReplayedEpisodes
from lrl.planning.simulator.length_sampling import Lognormal, ObservedLengths
from lrl.planning.simulator.simulate import Simulation
from lrl.routing.dispatch import RoundRobin

GENERATOR = LinearGenerator(kv_tokens=10**6, step_s=0.01, prefill_token_s=1e-3, pause_s=0.2)
TRAINER = LinearTrainer(token_s=1e-5, weights_s=0.2)
SCENE = Simulation(
    generators=[GENERATOR] * 3,
    trainer=TRAINER,
    lengths=Lognormal(20, 1.0, 200),
    steps=4,
    groups_per_step=3,
    rollouts_per_group=4,
    max_num_seqs=6,
    prompt_tokens=30,
    episodes=DrawnEpisodes(
        turns=ObservedLengths([1, 2, 5]), observation_tokens=7, tool_ms=Lognormal(300, 1.0, 5000)
    ),
)


def one_generator(**changes: Any) -> Simulation:
    """Returns a run of one step: two groups of four episodes, each of three turns of 40 tokens,
    with answers of 10 tokens."""
    few: dict[str, Any] = {"generators": [GENERATOR], "steps": 1, "groups_per_step": 2}
    shapes = DrawnEpisodes(turns=ObservedLengths([3]), observation_tokens=10)
    few |= {"lengths": Lognormal(40, 0.0, 40), "max_num_seqs": 99, "episodes": shapes}
    return replace(SCENE, **few | changes)


@pytest.mark.parametrize("max_lag", [0, 2])
def test_every_turn_of_every_episode_is_trained_once_within_the_lag(max_lag: int) -> None:
    records: list[Record] = []
    forecast = replace(SCENE, max_lag=max_lag).run(records.append)
    groups = [record for record in records if isinstance(record, GroupRecord)]
    assert sorted(group.index for group in groups) == list(range(12))
    turns = [turns for group in groups for turns in group.turns]
    assert {len(of_one) for of_one in turns} == {1, 2, 5}
    assert {before for of_one in turns for before, _ in of_one[1:]} == {7}
    own = sum(tokens for of_one in turns for _, tokens in of_one)
    assert own == forecast.lags.total() == sum(one.tokens for one in forecast.generators)
    assert max(forecast.lags) <= max_lag
    work = [record for record in records if isinstance(record, GeneratorRecord)]
    assert max(record.responses for record in work) <= SCENE.max_num_seqs


def test_episodes_do_not_depend_on_dispatch_or_lag() -> None:
    def episodes(scene: Simulation) -> list[GroupRecord]:
        records: list[Record] = []
        scene.run(records.append)
        groups = [record for record in records if isinstance(record, GroupRecord)]
        return sorted(groups, key=lambda group: group.index)

    assert episodes(SCENE) == episodes(replace(SCENE, dispatch=RoundRobin, max_lag=3))


def test_a_place_is_free_while_a_tool_runs() -> None:
    slow = DrawnEpisodes(
        turns=ObservedLengths([3]), observation_tokens=10, tool_ms=ObservedLengths([50_000])
    )
    forecast = one_generator(episodes=slow, max_num_seqs=4).run()
    # One group writes its turns while the other's tools run: a step lasts three answers and not six.
    # The first group's turns take 0.4 s each, the second's begin when the first's have ended.
    assert 150 < forecast.steps[0].seconds < 155


def test_a_tool_leaves_the_generator_idle_unless_other_episodes_are_in_flight() -> None:
    def busy(max_lag: int) -> float:
        tool = ObservedLengths([1200])
        slow = DrawnEpisodes(turns=ObservedLengths([3]), observation_tokens=10, tool_ms=tool)
        return one_generator(episodes=slow, max_lag=max_lag, steps=20).run().busy

    assert busy(0) < 0.4 and busy(0) < busy(1) < busy(3)


def test_a_later_turn_reads_only_what_is_new_where_its_episode_was_written() -> None:
    def read(scene: Simulation) -> int:
        records: list[Record] = []
        scene.run(records.append)
        return sum(one.prefill_tokens for one in records if isinstance(one, GeneratorRecord))

    # Two prompts of 30 tokens, and then each of eight episodes reads two answers of 10 tokens.
    assert read(one_generator()) == 2 * 30 + 8 * 2 * 10
    # A cache without room for all episodes loses the oldest.
    tight = replace(GENERATOR, kv_tokens=400)
    assert read(one_generator(generators=[tight], max_num_seqs=2)) > 2 * 30 + 8 * 2 * 10


def test_a_sync_empties_the_prefix_cache_unless_it_keeps_it() -> None:
    tool = ObservedLengths([1000, 3000])
    shapes = DrawnEpisodes(turns=ObservedLengths([3]), observation_tokens=10, tool_ms=tool)

    def reuse(**how: Any) -> float | None:
        return one_generator(steps=6, max_lag=2, episodes=shapes, **how).run().prefix_reuse

    assert reuse(keys_and_values="keep") == 1.0
    emptied = reuse(keys_and_values="recompute")
    assert emptied is not None and 0.3 < emptied < 1.0


def test_replayed_episodes_are_the_recorded_ones() -> None:
    answers = [[Answer(3, 11), Answer(1, 2)], []]
    records: list[Record] = []
    one_generator(episodes=ReplayedEpisodes(answers), rollouts_per_group=2).run(records.append)
    found = [record.turns for record in records if isinstance(record, GroupRecord)]
    assert found == [[[[0, 40], [3, 11], [1, 2]], [[0, 40]]]] * 2


def test_an_environment_that_writes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="observation_tokens is 0; it must be at least 1"):
        DrawnEpisodes(turns=ObservedLengths([2]), observation_tokens=0)
