"""An argument that a class of lrl does not have is answered with the one that is meant."""

from __future__ import annotations

from typing import Any

import pytest

import lrl
from lrl.system import config_errors


class Mine(lrl.objectives.PPO):
    """A class of a user, with the arguments of its base."""


class Own:
    """A class that is none of lrl's."""

    def __init__(self, num_generations: int) -> None:
        self.num_generations = num_generations


def shown(call: Any, capsys: pytest.CaptureFixture[str], **arguments: Any) -> str:
    """What a script that ends with this call shows."""
    with pytest.raises(TypeError) as caught:
        call(**arguments)
    config_errors._show(TypeError, caught.value, caught.tb)
    text = capsys.readouterr().err
    assert "Traceback" in text and "unexpected keyword argument" in text
    return text.splitlines()[-1]


@pytest.mark.parametrize(
    ("call", "argument", "answer"),
    [
        (lrl.RolloutDataModule, "num_generations", "Here it is data.rollouts_per_group."),
        (lrl.RolloutDataModule, "top_p", "There is none"),
        (lrl.RolloutDataModule, "rollout_per_group", "Did you mean rollouts_per_group?"),
        (lrl.PolicyModule, "beta", "Here it is model.reference."),
        (lrl.objectives.PPO, "epsilon", "Here it is model.objective."),
        (Mine, "epsilon_hi", "Did you mean epsilon_high?"),
        (lrl.Prompts, "prompt_col", "Did you mean prompt_column?"),
    ],
)
def test_an_argument_of_another_library_or_a_misspelt_one_is_answered(
    call: Any, argument: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    last = shown(call, capsys, **{argument: 8})
    assert last.startswith("lrl: ") and f"no argument {argument!r}. {answer}" in last


@pytest.mark.parametrize(
    ("call", "argument"), [(lrl.RolloutDataModule, "zzz"), (Own, "num_generation")]
)
def test_nothing_is_said_of_what_is_like_no_argument_or_of_a_users_class(
    call: Any, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(call, capsys, **{argument: 8}).startswith("TypeError: ")
