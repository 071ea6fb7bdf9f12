"""Rooms whose names are imported at their first use."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from lrl.cli.setting_errors import ROOMS


@pytest.mark.parametrize("room", ROOMS)
def test_every_name_of_a_room_is_listed_and_can_be_imported(room: str) -> None:
    module = import_module(room)
    assert set(dir(module)) >= set(module.__all__), "Tab completes what `dir` lists"
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_a_name_that_a_room_does_not_have_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"module 'lrl\.objectives' has no attribute 'PPOO'$"):
        import_module("lrl.objectives").PPOO  # noqa: B018


def test_an_objective_of_another_library_is_answered_in_a_script_too() -> None:
    script = "import lrl; lrl.objectives.GRPO()"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    last = ran.stderr.splitlines()[-1]
    assert last.endswith("Here it is --model.objective PPO --data.advantages GRPO.")
