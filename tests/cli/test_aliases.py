"""Names of TRL, verl and others: each answer names settings and classes that there are, and none
that misleads."""

from __future__ import annotations

import re

import pytest

import lrl
from lrl import callbacks
from lrl.cli import aliases, fit_help
from lrl.cli.setting_errors import explain, settings_of

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


def test_no_alias_is_a_setting_that_there_is() -> None:
    own = {name.rpartition(".")[2] for name in fit_help.all_settings()} - {"seed"}
    assert not own & aliases.SETTINGS.keys(), "`seed` is that of a data set's order"


ELSEWHERE = {
    "num_generations": "data.rollouts_per_group",
    "actor_rollout_ref.rollout.n": "data.rollouts_per_group",
    "learning_rate": "model.lr",
    "max_completion_length": "data.max_response_tokens",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "beta": "model.reference.coefficient",
    "clip_ratio_high": "epsilon_high",
    "train_batch_size": "data.groups_per_step",
    "num_iterations": "There is none",
    "top_p": "There is none",
    "Max-Staleness": "data.max_lag",
}


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("option", ["--{} 8", "--{}=8", "{}=8"])
def test_a_setting_of_another_library_is_answered_with_the_one_here(name: str, option: str) -> None:
    text = explain(f"unrecognized arguments: {option.format(name)}")
    assert ELSEWHERE[name] in text and "Did you mean" not in text, text


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--max_lag", "--data.max_lag"),
        ("--modle.lr", "--model.lr"),
        ("--data.max_lagg", "--data.max_lag"),
        ("--dtype", "--model.dtype or --trainer.strategy.server.dtype"),
        ("--lr_schedule", "--model.schedule"),
    ],
)
def test_a_misspelt_setting_is_answered_with_the_nearest_one(word: str, meant: str) -> None:
    assert explain(f"unrecognized arguments: {word} 8").endswith(f"Did you mean {meant}?")


@pytest.mark.parametrize(
    "word", ["--data.num_rollout_workers", "--model.foo", "--trainer.strategy.colocate", "--x"]
)
def test_what_is_like_no_setting_is_answered_with_none(word: str) -> None:
    assert explain(f"unrecognized arguments: {word} 8") == f"{word}: there is no such setting."
