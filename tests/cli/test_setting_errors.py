"""An unknown setting is answered with the one that was meant, whoever has its name.

Covers lrl/system/aliases.py.
"""

from __future__ import annotations

import re

import pytest

import lrl
from lrl.cli import fit_help
from lrl.cli.setting_errors import explain
from lrl.system import aliases

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
    known = {*fit_help.all_settings(), "trainer.logger", "--ckpt_path"}
    for answer in aliases.SETTINGS:
        assert set(re.findall(r"\b(?:model|data|trainer)(?:\.\w+)+", answer)) <= known, answer
    for answer in aliases.OBJECTIVES.values():
        assert all(hasattr(lrl.objectives, name) for name in re.findall(r"objective (\w+)", answer))
        assert all(
            hasattr(lrl.advantages, name) for name in re.findall(r"advantages (\w+)", answer)
        )


def test_no_alias_is_a_setting_that_there_is() -> None:
    own = {name.rpartition(".")[2] for name in fit_help.all_settings()} - {"seed"}
    elsewhere = {word for names in aliases.SETTINGS.values() for word in names.split()}
    assert not own & {*elsewhere, *aliases.ABSENT.split()}, "`seed` is that of a data set's order"
