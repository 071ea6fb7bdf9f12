"""A function as a reward: by itself or by its path, and what is refused."""

import asyncio
import inspect
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import odd_rewards  # noqa: E402

from lrl.rewards import GSM8K, Function, as_reward  # noqa: E402
from lrl.rewards.function import as_list  # noqa: E402


@pytest.mark.parametrize(
    "function", ["odd_rewards:length", "odd_rewards.length", odd_rewards.length]
)
def test_a_function_or_its_path_is_a_reward(function):
    reward = as_reward(function)
    assert (reward.name, reward.weight) == ("length", 1.0)
    assert reward("", "", num_tokens=3, finish_reason="stop", other=None) == 3


def test_a_reward_is_not_wrapped_again():
    reward = GSM8K(weight=0.5)
    assert as_reward(reward) is reward


@pytest.mark.parametrize(
    "path", ["no_such_module:f", "odd_rewards:no_such_name", "bare", "odd_rewards:os.sep", ":"]
)
def test_a_path_that_leads_nowhere_is_refused_by_name(path):
    with pytest.raises(ValueError, match=f"The reward '{path}'"):
        Function(path)


def test_a_function_without_columns_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"def no_columns\(prompt, response, \*\*columns\)"):
        Function(odd_rewards.no_columns)


@pytest.mark.parametrize("function", [odd_rewards.needs_level, odd_rewards.needs_level_by_place])
def test_a_column_that_only_some_rows_have_is_missing_in_the_others(function):
    """A call would raise, for a response that no reward could then have."""
    reward = Function(function)
    assert reward.missing_column(["answer"]) == "'level'"
    assert reward.missing_column(["answer", "level"]) == ""
    reward.check_row({"level": 3})
    with pytest.raises(ValueError, match="the row has no column 'level', only .'answer'."):
        reward.check_row({"answer": "72"})


def port_in(error):
    """Returns the function that the error about a reward of TRL tells to write."""
    code = re.search("`((?:async )?def .*)`, and give", str(error))[1]
    names = dict(vars(odd_rewards))
    exec(code, names)
    return names[re.search(r"def (\w+)", code)[1]]


@pytest.mark.parametrize(
    ("name", "reward"),
    [("trl_reward", 2.0), ("trl_reward_with_columns", 1.0), ("trl_reward_later", 2.0)],
)
def test_a_reward_of_trl_is_refused_with_a_port_that_works(name, reward):
    with pytest.raises(
        ValueError, match=f"The reward {name} takes `completions`, as a reward function of TRL"
    ) as caught:
        Function(f"odd_rewards:{name}")
    ported = Function(port_in(caught.value))
    found = ported("What is it?", "72", answer="72", finish_reason="stop", num_tokens=2)
    assert (asyncio.run(found) if inspect.isawaitable(found) else found) == reward


@pytest.mark.parametrize("function", [odd_rewards.swapped, odd_rewards.only_response])
def test_a_function_that_would_get_the_prompt_for_the_response_is_refused(function):
    with pytest.raises(
        ValueError, match=rf"def {function.__name__}\(prompt, response, \*\*columns\)"
    ):
        Function(function)


def test_an_object_that_is_no_reward_is_refused():
    with pytest.raises(TypeError, match="rewards has 1"):
        as_reward(1)


def test_no_reward_may_be_written_as_null() -> None:
    assert as_list(None) == as_list(()) == []
