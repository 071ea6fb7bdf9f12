"""A reward that is wrong trains the wrong thing: test it first. `pytest` runs this file."""

import pytest
from rewards import right


@pytest.mark.parametrize(
    ("response", "worth"),
    [
        ("7+8=15,4+3+1=8>85", 1.0),
        ("It is 85.", 1.0),
        ("85 or 86", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts(response: str, worth: float) -> None:
    """Also if a calculation stands before it."""
    assert right("47+38=", response, answer="85") == worth
