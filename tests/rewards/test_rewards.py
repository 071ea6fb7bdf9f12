"""The small rewards, and functions as rewards.

Covers lrl/rewards/base.py, scoring.py, simple.py.
"""

import json

import numpy
import pytest

from lrl.checkpoints.made_with import fingerprint
from lrl.errors import BadAnswer, CountedError
from lrl.rewards import ExactMatch, Format, Function, Judge, LengthPenalty, RewardModel, as_reward
from lrl.rewards.base import as_list
from lrl.rewards.pool import read_outcomes
from lrl.rewards.scoring import Scored, parts_of
from tests.rewards import odd_rewards


def test_the_pattern_must_match_the_whole_response():
    reward = Format(r"<think>.*</think>\s*\d+")
    assert reward("", " <think>a\nb</think> 72\n") == 1.0
    assert reward("", "Well, <think>a</think> 72") == 0.0


def test_white_space_around_an_exact_match_does_not_matter():
    assert ExactMatch("word")("", " yes\n", word="yes") == 1.0
    assert ExactMatch("word")("", "Yes", word="yes") == 0.0
    with pytest.raises(ValueError, match="no column `word`"):
        ExactMatch("word")("", "yes", answer="yes")


NUMBERS = [
    (0.00005, "0.00005", "5e-05"), (1e16, "10000000000000000", "1e+16"), (72.0, "72", "72.00"),
    (72.0, "72.0", "7"), ("72.0", "72.0", "72"),
    (123456789012345678, "123456789012345678", "123456789012345680"), (True, "True", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "right", "wrong"), NUMBERS)
def test_a_number_of_a_column_is_written_out(answer, right, wrong):
    ExactMatch().check_row({"answer": answer})
    assert ExactMatch()("", right, answer=answer) == 1.0
    assert ExactMatch()("", wrong, answer=answer) == 0.0


@pytest.mark.parametrize("answer", [None, float("nan"), ["yes"], {"text": "yes"}])
def test_a_column_without_a_text_or_a_number_is_no_reference(answer):
    with pytest.raises(ValueError, match="column `answer`"):
        ExactMatch().check_row({"answer": answer})


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0), (100, 0), (125, -0.25), (200, -1), (1000, -1)]
)
def test_the_length_penalty_equals_dapos(num_tokens, penalty):
    assert LengthPenalty(100, 200)("", "", num_tokens=num_tokens) == penalty


ODD = "tests.rewards.odd_rewards"


@pytest.mark.parametrize("function", [f"{ODD}:length", f"{ODD}.length", odd_rewards.length])
def test_a_function_or_its_path_is_a_reward(function):
    reward = as_reward(function)
    assert (reward.name, reward.weight) == ("length", 1.0)
    assert reward("", "", num_tokens=3, finish_reason="stop", other=None) == 3
    assert as_reward(reward) is reward


def test_a_column_that_only_some_rows_have_is_missing_in_the_others():
    reward = Function(odd_rewards.level)
    reward.check_row({"level": 3})
    with pytest.raises(ValueError, match="argument: 'level'; the row has only .'answer'."):
        reward.check_row({"answer": "72"})


def test_no_reward_may_be_written_as_null() -> None:
    assert as_list(None) == as_list(()) == []


URL = "http://127.0.0.1:9"


def judge(**settings):
    return Judge(**({"url": URL, "model": "m", "template": "{response}"} | settings))


def model(**settings):
    return RewardModel(**({"url": URL} | settings))


@pytest.mark.parametrize(
    ("same", "others"),
    [
        ([judge(), judge(retries=9)], [judge(template="Be strict. {response}"), judge(weight=0.5)]),
        ([model(), model(retries=1, timeout_s=1.0)], [model(label=1), model(url=URL + "0")]),
    ],
)
def test_a_checkpoint_sees_a_change_of_the_score_and_not_of_how_long_it_is_tried(same, others):
    assert len({fingerprint(reward) for reward in same}) == 1
    assert len({fingerprint(reward) for reward in [*same, *others]}) == 3


# ---- what a worker takes for a number, and rank 0 for an outcome

VALUES = [
    (True, 1.0), (False, 0.0), (numpy.float32(0.5), 0.5), (numpy.float16(0.5), 0.5),
    (numpy.int64(3), 3.0), (numpy.bool_(True), 1.0), (numpy.array(0.25), 0.25),
    ({"form": True, "sense": numpy.bool_(False)}, None),
]  # fmt: skip


@pytest.mark.parametrize(("value", "number"), VALUES)
def test_a_bool_and_a_numpy_value_of_one_number_are_numbers(value, number):
    parts = parts_of("f", value)
    assert parts == ({"f/form": 1.0, "f/sense": 0.0} if number is None else {"f": number})
    assert all(type(part) is float for part in parts.values())


def test_the_name_of_a_part_is_one_that_every_tracker_takes():
    assert parts_of("f", {"\ud83d": 1}) == {r"f/\ud83d": 1.0}


@pytest.mark.parametrize(
    "value", [numpy.array([1.0]), numpy.str_("1.0"), numpy.float32("nan"), [True]]
)
def test_any_other_array_is_not_a_number(value):
    with pytest.raises(CountedError):
        parts_of("f", value)


def test_an_answer_about_other_responses_is_no_outcome():
    with pytest.raises(BadAnswer):
        read_outcomes([None, None], count=1)


def test_outcomes_travel_as_they_are():
    outcomes = [
        Scored(0.5, {"a/b": 0.25, "c": 0.25}, "math: too much"),
        "timeout: no reward after 1 s",
        None,
    ]
    assert read_outcomes(json.loads(json.dumps(outcomes)), 3) == outcomes
