"""What a worker takes for a number, and rank 0 for an outcome."""

import json

import numpy
import pytest

from lrl.errors import BadAnswer, CountedError
from lrl.rewards.scoring import Scored, parts_of, read_outcomes

NUMBERS = [
    (True, 1.0), (False, 0.0), (numpy.float32(0.5), 0.5), (numpy.float16(0.5), 0.5),
    (numpy.int64(3), 3.0), (numpy.bool_(True), 1.0), (numpy.array(0.25), 0.25),
    ({"form": True, "sense": numpy.bool_(False)}, None),
]  # fmt: skip


@pytest.mark.parametrize(("value", "number"), NUMBERS)
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
        "timeout: obey: no reward after 1 s",
        None,
    ]
    assert read_outcomes(json.loads(json.dumps(outcomes)), 3) == outcomes
