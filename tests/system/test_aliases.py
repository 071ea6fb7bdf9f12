"""Names of TRL, verl and others: each answer names settings and classes that there are, and none
that misleads."""

from __future__ import annotations

import re

import pytest

import lrl
from lrl import callbacks
from lrl.cli import fit_help
from lrl.cli.setting_errors import settings_of
from lrl.system import aliases

KNOWN = {
    *fit_help.all_settings(),
    *(f"model.reference.{name}" for name in settings_of("lrl.Reference")),
    *(f"model.critic.{name}" for name in settings_of("lrl.Critic")),
    *(f"data.advantages.{name}" for name in settings_of("lrl.advantages.GAE")),
    *(f"data.advantages.{name}" for name in settings_of("lrl.advantages.RewardToGo")),
    *(f"model.lora.{name}" for name in settings_of("lrl.LoRA")),
    *(f"model.objective.{name}" for name in settings_of("lrl.objectives.PPO")),
    *(f"trainer.logger.{name}" for name in ("name", "project")),
    "trainer.callbacks.prompts",
    "trainer.callbacks.every_n_train_steps",
    "trainer.callbacks.save_top_k",
}
ANSWERS = [*aliases.SETTINGS.values(), *aliases.CLASSES.values()]


@pytest.mark.parametrize("answer", sorted(set(ANSWERS)))
def test_every_setting_and_class_of_an_answer_exists(answer: str) -> None:
    assert set(re.findall(r"\b(?:model|data|trainer)(?:\.\w+)+", answer)) <= KNOWN
    for module, name in re.findall(r"\blrl\.(\w+)\.([A-Z]\w+)", answer):
        assert hasattr(getattr(lrl, module, callbacks), name), name
    for name in re.findall(r"--model\.objective (\w+)|model\.objective ([A-Z]\w+)", answer):
        assert hasattr(lrl.objectives, "".join(name))
    for name in re.findall(r"--data\.advantages (\w+)", answer):
        assert hasattr(lrl.advantages, name)


def test_tools_of_trl_are_the_environment_with_tools() -> None:
    assert "lrl.environments.Tools" in aliases.setting("tools")


def test_no_alias_is_a_setting_that_there_is() -> None:
    own = {name.rpartition(".")[2] for name in fit_help.all_settings()} - {"seed"}
    assert not own & aliases.SETTINGS.keys(), "`seed` is that of a data set's order"
