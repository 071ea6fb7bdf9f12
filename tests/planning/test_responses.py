"""Sampled response lengths."""

from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.planning.costs import LinearGenerator, LinearTrainer
from lrl.planning.responses import (
    Answer,
    DrawnEpisodes,
    Lognormal,
    ObservedLengths,
    ReplayedEpisodes,
    RunLengths,
)
from lrl.planning.simulation import Simulation
from lrl.rollouts.timeline import GeneratorRecord, GroupRecord, Record


def test_a_length_depends_only_on_prompt_group_and_seed() -> None:
    lengths, same = (Lognormal(100, 1.0, 10_000, seed=3) for _ in range(2))
    for number in (5, 2, 5):
        assert lengths.of(number, number, 4) == same.of(number, number, 4)
    assert lengths.of(5, 5, 4) != Lognormal(100, 1.0, 10_000, seed=4).of(5, 5, 4)
    # Another epoch's responses to the same prompt.
    assert lengths.of(5, 5, 4) != lengths.of(5, 6, 4)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_variance_between_prompts_has_its_share(share: float) -> None:
    lengths = Lognormal(1e6, 1.0, 10**9, prompt_share=share)
    logs = np.log([lengths.of(prompt, prompt, 2) for prompt in range(3000)])
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(share, abs=0.06)
    next_epoch = np.log([lengths.of(prompt, 3000 + prompt, 1)[0] for prompt in range(3000)])
    assert np.corrcoef(logs[:, 0], next_epoch)[0, 1] == pytest.approx(share, abs=0.06)


def test_lengths_follow_their_distribution() -> None:
    drawn = [length for n in range(2000) for length in Lognormal(100, 1.0, 800).of(n, n, 4)]
    assert median(drawn) == pytest.approx(100, rel=0.05) and max(drawn) == 800 and min(drawn) >= 1
    observed = ObservedLengths([1, 7, 7, 50], seed=1)
    seen = [length for n in range(2000) for length in observed.of(n, n, 4)]
    assert set(seen) == {1, 7, 50}
    assert sum(length == 7 for length in seen) / 8000 == pytest.approx(0.5, abs=0.05)


runs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)))


@given(runs, runs)
def test_run_lengths_read_and_grow_like_a_list(
    first: list[tuple[int, int]], then: list[tuple[int, int]]
) -> None:
    whole, more = ([value for value, count in runs for _ in range(count)] for runs in (first, then))
    short = RunLengths(first)
    assert list(short) == whole and bool(short) == bool(whole) and short[1:] == whole[1:]
    assert all(short[place] == value for place, value in enumerate(whole))
    for added in (more, RunLengths(then)):
        grown = RunLengths(first)
        grown += added
        assert isinstance(grown, RunLengths)
        assert list(grown) == [*whole, *more] and len(grown) == len(whole) + len(more)


GENERATOR = LinearGenerator(kv_tokens=10**6, step_s=0.01, prefill_token_s=1e-3, sync_pause_s=0.2)
TRAINER = LinearTrainer(token_s=1e-5, sync_s=0.2)
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
    few |= {"lengths": Lognormal(40, 0.0, 40), "max_num_seqs": 99, "episodes": three_turns()}
    return replace(SCENE, **few | changes)


def three_turns(*tool_ms: int) -> DrawnEpisodes:
    tool = ObservedLengths(tool_ms) if tool_ms else None
    return DrawnEpisodes(turns=ObservedLengths([3]), observation_tokens=10, tool_ms=tool)


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


def test_a_place_is_free_while_a_tool_runs() -> None:
    forecast = one_generator(episodes=three_turns(50_000), max_num_seqs=4).run()
    # One group writes its turns while the other's tools run: a step lasts three answers and not six.
    # The first group's turns take 0.4 s each, the second's begin when the first's have ended.
    assert 150 < forecast.steps[0].seconds < 155


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


def test_a_sync_empties_the_prefix_cache() -> None:
    reuse = one_generator(steps=6, max_lag=2, episodes=three_turns(1000, 3000)).run().prefix_reuse
    assert reuse is not None and 0.3 < reuse < 1.0


def test_replayed_episodes_are_the_recorded_ones() -> None:
    answers = [[Answer(3, 11), Answer(1, 2)], []]
    records: list[Record] = []
    one_generator(episodes=ReplayedEpisodes(answers), rollouts_per_group=2).run(records.append)
    found = [record.turns for record in records if isinstance(record, GroupRecord)]
    assert found == [[[[0, 40], [3, 11], [1, 2]], [[0, 40]]]] * 2
