"""An environment that answers wrongly teaches the wrong thing. `pytest` runs this file."""

from environment import Adder


def test_it_writes_the_sum_and_ends_without_an_equals_sign() -> None:
    """A turn that asks for nothing it knows gets no text."""
    assert Adder().reply("38+15=") == ("53", False, 0.0)
    assert Adder().reply("7=") == ("", False, 0.0)
    assert Adder().reply(">53") == ("", True, 0.0)
