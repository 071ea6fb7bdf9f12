"""Help has a line for each setting; an unknown setting is answered with the one that was meant,
whoever has its name.

Covers lrl/aliases.py.
"""

from __future__ import annotations

import inspect
import re

import pytest

import lrl
from lrl import aliases, callbacks
from lrl.cli import settings
from lrl.cli.main import LIGHTNINGS
from lrl.cli.settings import explain
from tests.cli.conftest import Say

NAMES = {
    "num_generations": "data.rollouts_per_group",
    "actor_rollout_ref.rollout.n": "data.rollouts_per_group",
    "learning_rate": "lrl's name for it is model.lr.",
    "epsilon": "epsilon_low and epsilon_high of model.objective lrl.objectives.PPO",
    "max_completion_length": "data.max_response_tokens",
    "beta": "model.reference",
    "num_iterations": "There is none here",
    "Max-Staleness": "data.max_lag",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_of_another_library_is_answered_with_the_one_here(name: str) -> None:
    for option in ("--{} 8", "--{}=8", "{}=8"):
        text = explain(f"unrecognized arguments: {option.format(name)}")
        assert NAMES[name] in text and "Did you mean" not in text, text


def test_a_script_is_answered_as_the_command_line_is() -> None:
    for kind, name in (
        (lrl.PolicyModule, "learning_rate"),
        (lrl.RolloutDataModule, "num_generations"),
        (lrl.Trainer, "num_train_epochs"),
    ):
        with pytest.raises(TypeError, match=name) as raised:
            kind(**{name: 8})
        assert raised.value.__notes__ == [aliases.setting(name)]


def test_a_misspelt_setting_is_answered_with_the_nearest_one_if_any_is_near() -> None:
    nearest = {
        "--max_lag": "data.max_lag",
        "--data.max_lagg": "data.max_lag",
        "--dtype": "model.dtype or trainer.strategy.server.dtype",
    }
    for word, meant in nearest.items():
        assert explain(f"unrecognized arguments: {word} 8").endswith(f"Did you mean {meant}?")
    far = "--trainer.strategy.colocate"
    assert explain(f"unrecognized arguments: {far} 8") == f"{far}: there is no such setting."


def test_every_setting_and_class_of_an_answer_exists() -> None:
    known = {*settings.all_settings(), "trainer.logger", "--ckpt_path"}
    for answer in aliases.SETTINGS:
        assert set(re.findall(r"\b(?:model|data|trainer)(?:\.\w+)+", answer)) <= known, answer
    for answer in aliases.OBJECTIVES.values():
        assert all(hasattr(lrl.objectives, name) for name in re.findall(r"objective (\w+)", answer))
        assert all(
            hasattr(lrl.advantages, name) for name in re.findall(r"advantages (\w+)", answer)
        )


def test_no_alias_is_a_setting_that_there_is() -> None:
    own = {name.rpartition(".")[2] for name in settings.all_settings()} - {"seed"}
    elsewhere = {word for names in aliases.SETTINGS.values() for word in names.split()}
    assert not own & {*elsewhere, *aliases.ABSENT.split()}, "`seed` is that of a data set's order"


@pytest.mark.parametrize("verb", LIGHTNINGS)
def test_help_has_the_settings_of_model_data_and_strategy_first_with_a_line_each(
    verb: str, say: Say
) -> None:
    status, text, _ = say(verb, "--help")
    lines = text.splitlines()
    assert status == 0 and len(lines) <= 150 and max(map(len, lines)) <= settings.WIDTH
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


def test_everything_that_lightning_takes_is_still_to_be_had(say: Say) -> None:
    for words, named in (
        ("fit --help all", "--trainer.limit_val_batches"),
        ("fit --model.objective.help GSPO", "epsilon_low"),
    ):
        status, out, _ = say(*words.split())
        assert status == 0 and named in out
