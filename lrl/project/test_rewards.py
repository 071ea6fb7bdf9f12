"""A reward that is wrong trains the wrong thing: test it first. `pytest` runs this file."""

import pytest
from rewards import right


@pytest.mark.parametrize(
    ("response", "is_right"),
    [
        ("7+8=15,4+3+1=8>85", True),
        ("It is 85.", True),
        ("85 or 86", False),
        ("I do not know.", False),
        ("", False),
    ],
)
def test_the_last_number_counts(response: str, is_right: bool) -> None:
    """Also if a calculation stands before it."""
    assert right("47+38=", response, answer="85") == is_right
