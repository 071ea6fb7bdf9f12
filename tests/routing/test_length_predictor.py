"""Length prediction: what it learns, and how well it ranks."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.routing.length_predictor import LengthPredictor
from lrl.routing.rankers import NgramRanker
from lrl.types import Group, Prompt
from tests import made
from tests.checkpoints.through_files import as_file, through_a_file


def make_prompt(id: int, *token_ids: int) -> Prompt:
    return Prompt(id=id, token_ids=list(token_ids) or [1, 2], text="")


def answered(prompt: Prompt, *lengths: int, cut: bool = False) -> Group:
    reason = "length" if cut else "stop"
    rollouts = [made.rollout(length, finish_reason=reason) for length in lengths]
    return Group(index=prompt.id, prompt=prompt, rollouts=rollouts)


class World:
    """Prompts of random words, some of which make a response long; responses grow with every
    step."""

    def __init__(self, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.worth = [self.draw.gauss(0.0, 0.5) for _ in range(200)]

    def prompt(self, id: int) -> Prompt:
        draw = random.Random(id)
        return make_prompt(id, *(draw.randrange(200) for _ in range(draw.randint(10, 40))))

    def group(self, id: int, growth: float = 0.0) -> Group:
        prompt = self.prompt(id)
        worth = sum(self.worth[word] for word in prompt.token_ids)
        log = 5.0 + growth + 2.0 * worth / math.sqrt(len(prompt.token_ids))
        lengths = [1 + int(math.exp(log + self.draw.gauss(0.0, 0.3))) for _ in range(4)]
        return answered(prompt, *lengths)


def mean_length(group: Group) -> float:
    return group.num_tokens / len(group.rollouts)


def test_prompts_that_were_never_seen_are_ranked_far_better_than_by_chance() -> None:
    world, lengths = World(), LengthPredictor()
    for step in range(30):
        lengths.end_step([world.group(64 * step + place, growth=step / 30) for place in range(64)])
    fresh = [world.group(10_000 + id) for id in range(500)]
    expected = np.array([lengths.expected(group.prompt) for group in fresh])
    found = np.array([mean_length(group) for group in fresh])
    for count, least in ((100, 0.6), (25, 0.35)):
        longest = set(np.argsort(-expected)[:count]) & set(np.argsort(-found)[:count])
        assert len(longest) > least * count


def test_newer_responses_to_a_prompt_count_more() -> None:
    lengths, others = LengthPredictor(), [answered(make_prompt(id, id), 100) for id in range(1, 50)]
    for length in (100, 100, 1000):
        lengths.end_step([*others, answered(make_prompt(0), length)])
    assert 280 < lengths.expected(make_prompt(0)) < 400  # half of the way, in the logarithm


def test_the_expected_length_of_a_seen_prompt_grows_with_all_responses() -> None:
    lengths = LengthPredictor(newest_weight=1.0)
    lengths.end_step([answered(make_prompt(0), 200), answered(make_prompt(1), 50)])
    lengths.end_step([answered(make_prompt(id), 1000) for id in range(2, 20)])
    assert lengths.expected(make_prompt(0)) == pytest.approx(2000)
    assert lengths.expected(make_prompt(1)) == pytest.approx(500)


def test_a_response_that_was_cut_is_at_least_as_long_as_expected() -> None:
    lengths = LengthPredictor(newest_weight=1.0)
    lengths.end_step([answered(make_prompt(id), 400) for id in range(10)])
    lengths.end_step(
        [answered(make_prompt(0), 100, 100, cut=True), answered(make_prompt(1), 100, 100)]
    )
    assert lengths.expected(make_prompt(0)) == pytest.approx(400)
    assert lengths.expected(make_prompt(1)) == pytest.approx(100)
    lengths.end_step([answered(make_prompt(1), 900, 900, cut=True)])
    assert lengths.expected(make_prompt(1)) == pytest.approx(900)


def test_a_response_longer_than_expected_is_expected_to_match_the_longer_ones() -> None:
    lengths = LengthPredictor()
    lengths.end_step(
        [answered(make_prompt(id), length) for id, length in enumerate((10, 10, 60, 100, 200))]
    )
    assert lengths.expected(make_prompt(0), written=9.0) == pytest.approx(10)
    assert lengths.expected(make_prompt(0), written=10.0) == pytest.approx(120)
    assert lengths.expected(make_prompt(0), written=100.0) == pytest.approx(200)
    assert lengths.expected(make_prompt(0), written=200.0) == 201


@given(st.lists(st.integers(1, 500), max_size=30), st.integers(0, 600), st.floats(0.01, 1))
def test_more_than_is_written_is_always_expected(
    seen: list[int], written: int, share: float
) -> None:
    lengths = LengthPredictor()
    lengths.end_step([answered(make_prompt(id), length) for id, length in enumerate(seen)])
    assert all(lengths.expected(make_prompt(id), written) > written for id in range(3))
    quantile = lengths.quantile(share)
    assert not seen or sum(length <= quantile for length in seen) >= share * len(seen)
    assert not seen or sum(length < quantile for length in seen) <= share * len(seen)


def test_learned_lengths_come_back_from_a_checkpoint() -> None:
    world, lengths, resumed = World(), LengthPredictor(), LengthPredictor()
    for step in range(6):
        lengths.end_step([world.group(40 * step + place) for place in range(40)])
    resumed.load_state_dict(through_a_file(lengths.state_dict()))
    for other in (lengths, resumed):
        World.__init__(world, 7)
        other.end_step([world.group(id) for id in range(30)])
    for id in (*range(0, 240, 7), *range(900, 920)):
        mine, its = (each.expected(world.prompt(id)) for each in (lengths, resumed))
        assert mine == pytest.approx(its, rel=1e-4)
    assert resumed.quantile(0.9) == lengths.quantile(0.9)


def test_the_number_of_remembered_prompts_is_bounded() -> None:
    lengths, sizes = LengthPredictor(seen_prompts=20, ranker=NgramRanker(fitted_prompts=30)), []
    for step in range(90):
        lengths.end_step(
            [answered(make_prompt(20 * step + id, *range(40)), *[9] * 16) for id in range(20)]
        )
        if step % 30 == 29:
            sizes.append(len(as_file(lengths.state_dict())))
    fewer = LengthPredictor(seen_prompts=5)
    fewer.load_state_dict(through_a_file(lengths.state_dict()))
    assert fewer.state_dict()["seen_ids"].tolist() == list(range(1795, 1800))
    assert max(sizes) == min(sizes)
    assert lengths.state_dict()["seen_ids"].tolist() == list(range(1780, 1800))
