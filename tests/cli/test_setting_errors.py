"""An unknown setting is answered with the one that was meant, whoever has its name."""

from __future__ import annotations

import pytest

from lrl.cli.setting_errors import explain

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


NESTED = """Parser key "data":
    - Problem with given class_path 'lrl.RolloutDataModule':
        Parser key "environment":
          {}
"""


def test_a_text_in_the_place_of_a_list_is_told_that_it_must_be_one() -> None:
    of_tools = """- Problem with given class_path 'lrl.environments.Tools':
                Parser key "tools":
                  Expected a <class 'collections.abc.Sequence'>. Got value: my_tools.look"""
    assert explain(NESTED.format(of_tools)) == (
        "data.environment.tools is 'my_tools.look'; it must be a list, as in [1, 2]."
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("environment.py:Guess", " Did you mean environment.Guess?"),
        ("./games/guess.py:Guess", " Did you mean games.guess.Guess?"),
        ("games.guess:", ""),
    ],
)
def test_a_class_that_is_named_as_a_function_of_a_file_is_answered(name: str, meant: str) -> None:
    text = explain(NESTED.format(f"Unexpected import path format: {name}"))
    assert text.startswith(f"data.environment is {name!r}; it takes the name of a class")
    assert text.endswith(f"follows --config.{meant}")
