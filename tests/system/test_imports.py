"""Rooms whose names are imported at their first use."""

from __future__ import annotations

from importlib import import_module

import pytest

from lrl.system.import_by_name import ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_every_name_of_a_room_is_listed_and_can_be_imported(room: str) -> None:
    module = import_module(room)
    assert set(dir(module)) >= set(module.__all__), "Tab completes what `dir` lists"
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_a_name_that_a_room_does_not_have_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"module 'lrl\.objectives' has no attribute 'PPOO'$"):
        import_module("lrl.objectives").PPOO  # noqa: B018
