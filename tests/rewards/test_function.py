"""A function as a reward: by itself or by its path, and what is refused."""

import pytest

from lrl.rewards import Function, as_reward
from lrl.rewards.function import as_list
from tests.rewards import odd_rewards


@pytest.mark.parametrize(
    "function",
    ["tests.rewards.odd_rewards:length", "tests.rewards.odd_rewards.length", odd_rewards.length],
)
def test_a_function_or_its_path_is_a_reward(function):
    reward = as_reward(function)
    assert (reward.name, reward.weight) == ("length", 1.0)
    assert reward("", "", num_tokens=3, finish_reason="stop", other=None) == 3
    assert as_reward(reward) is reward


ODD = "tests.rewards.odd_rewards"


@pytest.mark.parametrize(
    "path", ["no_such_module:f", f"{ODD}:no_such_name", "bare", f"{ODD}:os.sep", ":"]
)
def test_a_path_that_leads_nowhere_is_refused_by_name(path):
    with pytest.raises(ValueError, match=f"The reward '{path}'"):
        Function(path)


@pytest.mark.parametrize("function", [odd_rewards.level, odd_rewards.needs_level_by_place])
def test_a_column_that_only_some_rows_have_is_missing_in_the_others(function):
    """A call would raise, for a response that no reward could then have."""
    reward = Function(function)
    reward.check_row({"level": 3})
    with pytest.raises(ValueError, match="the row has no column 'level', only .'answer'."):
        reward.check_row({"answer": "72"})


def test_a_reward_of_trl_is_refused_with_what_to_write():
    with pytest.raises(ValueError, match=r"function of TRL.*`def trl_reward_of_one\(prompt, resp"):
        Function(odd_rewards.trl_reward)


WRONG = [odd_rewards.no_columns, odd_rewards.swapped, odd_rewards.only_response]


@pytest.mark.parametrize("function", WRONG)
def test_a_function_that_would_get_the_prompt_for_the_response_is_refused(function):
    define = rf"def {function.__name__}\(prompt, response, \*\*columns\)"
    with pytest.raises(ValueError, match=define):
        Function(function)


def test_no_reward_may_be_written_as_null() -> None:
    assert as_list(None) == as_list(()) == []
