"""The small rewards, and functions as rewards."""

import asyncio
import inspect
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

sys.path.insert(0, str(Path(__file__).parent))

import odd_rewards  # noqa: E402

import lrl.rewards  # noqa: E402
from lrl.rewards import GSM8K, ExactMatch, Format, Function, LengthPenalty, Reward, as_reward  # noqa: E402


@pytest.mark.parametrize("name", lrl.rewards.__all__)
def test_every_public_name_is_there(name):
    assert hasattr(lrl.rewards, name)


def test_the_pattern_must_match_the_whole_response():
    reward = Format(r"<think>.*</think>\s*\d+")
    assert reward("", " <think>a\nb</think> 72\n") == 1.0
    assert reward("", "Well, <think>a</think> 72") == 0.0


def test_an_invalid_pattern_is_refused():
    with pytest.raises(ValueError, match=r"pattern='\('"):
        Format("(")


def test_white_space_around_an_exact_match_does_not_matter():
    assert ExactMatch("word")("", " yes\n", word="yes") == 1.0
    assert ExactMatch("word")("", "Yes", word="yes") == 0.0
    with pytest.raises(ValueError, match="no column `word`"):
        ExactMatch("word")("", "yes", answer="yes")


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (0.00005, "0.00005", "5e-05"),
        (1e16, "10000000000000000", "1e+16"),
        (72.0, "72", "72.00"),
        (72.0, "72.0", "7"),
        ("72.0", "72.0", "72"),
        (123456789012345678, "123456789012345678", "123456789012345680"),
        (True, "True", "1"),
    ],
)
def test_a_number_of_a_column_is_written_out(answer, right, wrong):
    ExactMatch().check_row({"answer": answer})
    assert ExactMatch()("", right, answer=answer) == 1.0
    assert ExactMatch()("", wrong, answer=answer) == 0.0


@pytest.mark.parametrize("answer", [None, float("nan"), ["yes"], {"text": "yes"}])
def test_a_column_without_a_text_or_a_number_is_no_reference(answer):
    for judge in (ExactMatch().check_row, lambda columns: ExactMatch()("", "None", **columns)):
        with pytest.raises(ValueError, match="column `answer`"):
            judge({"answer": answer})


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0), (100, 0), (125, -0.25), (200, -1), (1000, -1)]
)
def test_the_length_penalty_equals_dapos(num_tokens, penalty):
    assert LengthPenalty(100, 200)("", "", num_tokens=num_tokens) == penalty


@given(st.integers(0, 100), st.integers(1, 100), st.integers(0, 300))
def test_a_longer_response_is_never_punished_less(free, span, num_tokens):
    reward = LengthPenalty(free, free + span)
    assert (
        -1
        <= reward("", "", num_tokens=num_tokens + 1)
        <= reward("", "", num_tokens=num_tokens)
        <= 0
    )


def test_a_length_penalty_without_a_slope_is_refused():
    with pytest.raises(ValueError, match="below max_tokens"):
        LengthPenalty(200, 200)


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


class Brevity(Reward):
    def __call__(self, prompt, response, **columns):
        return -len(response)


def test_a_users_own_reward_needs_no_constructor():
    assert (Brevity().name, Brevity(0.1, name="short").weight) == ("Brevity", 0.1)


def test_rewards_are_configured_by_class_path():
    parser = ArgumentParser()
    parser.add_argument("--rewards", type=list[Reward])
    given_rewards = [
        {"class_path": "lrl.rewards.GSM8K"},
        {"class_path": "lrl.rewards.Math", "init_args": {"weight": 2.0}},
        {
            "class_path": "lrl.rewards.Function",
            "init_args": {"function": "odd_rewards:length", "weight": 0.1},
        },
    ]
    rewards = parser.instantiate(parser.parse_object({"rewards": given_rewards})).rewards
    assert [(reward.name, reward.weight) for reward in rewards] == [
        ("gsm8k", 1.0),
        ("math", 2.0),
        ("length", 0.1),
    ]


def test_an_unknown_name_is_no_reward():
    with pytest.raises(AttributeError, match="NoSuch"):
        getattr(lrl.rewards, "NoSuch" + "Reward")
