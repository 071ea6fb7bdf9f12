"""What a worker takes for a number."""

import numpy
import pytest

from lrl.errors import CountedError
from lrl.rewards.worker import parts_of


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (False, 0.0),
        (numpy.float32(0.5), 0.5),
        (numpy.float16(0.5), 0.5),
        (numpy.int64(3), 3.0),
        (numpy.bool_(True), 1.0),
        (numpy.array(0.25), 0.25),
        ({"form": True, "sense": numpy.bool_(False)}, None),
    ],
)
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
