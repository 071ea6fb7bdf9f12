"""Help of the command: a line for each setting, with types and defaults as they are typed."""

from __future__ import annotations

import inspect
import sys

import pytest

import lrl
from lrl import callbacks
from lrl.cli import fit_help
from lrl.cli.main import LIGHTNINGS
from tests.cli.conftest import Say


@pytest.mark.parametrize("verb", LIGHTNINGS)
def test_help_has_the_settings_of_model_data_and_strategy_first_with_a_line_each(
    verb: str, say: Say
) -> None:
    status, text, _ = say(verb, "--help")
    lines = text.splitlines()
    assert status == 0 and len(lines) <= 150 and max(map(len, lines)) <= fit_help.WIDTH
    names = ("model.model", "data.prompts", "trainer.strategy.server", "trainer.devices")
    order = [text.index(f"--{name} ") for name in names]
    assert order == sorted(order)
    classes = {
        "model": lrl.PolicyModule,
        "data": lrl.RolloutDataModule,
        "trainer.strategy": lrl.AsyncSingleDevice.__mro__[1],
        "trainer.strategy.server": lrl.ServerSettings,
    }
    for prefix, kind in classes.items():
        for name, parameter in inspect.signature(kind).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD:
                (line,) = (line for line in lines if line.startswith(f"  --{prefix}.{name} "))
                assert len(line.split()) > 3, "a type and a sentence stand beside it"
    to_name = {*callbacks.__all__} - {"OnRankZero"}
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in to_name)
    assert not any("OnRankZero" in line for line in lines), "a base is no callback to name"


def test_everything_that_lightning_takes_is_still_to_be_had(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lrl"])
    for words, named in (
        ("fit --help all", "--trainer.limit_val_batches"),
        ("fit --model.objective.help GSPO", "epsilon_low"),
    ):
        status, out, _ = say(*words.split())
        assert status == 0 and named in out
