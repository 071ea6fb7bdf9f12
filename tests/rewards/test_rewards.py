"""The small rewards, functions as rewards, and rewards by their class paths.

Covers lrl/rewards/base.py, simple.py.
"""

import inspect
import re
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

import lrl.rewards
from lrl.checkpoints.resume import fingerprint
from lrl.rewards import (
    Code,
    ExactMatch,
    Format,
    Function,
    Judge,
    LengthPenalty,
    Reward,
    RewardModel,
    as_reward,
)
from lrl.rewards.base import as_list
from tests.rewards import odd_rewards


def test_the_pattern_must_match_the_whole_response():
    reward = Format(r"<think>.*</think>\s*\d+")
    assert reward("", " <think>a\nb</think> 72\n") == 1.0
    assert reward("", "Well, <think>a</think> 72") == 0.0


def test_white_space_around_an_exact_match_does_not_matter():
    assert ExactMatch("word")("", " yes\n", word="yes") == 1.0
    assert ExactMatch("word")("", "Yes", word="yes") == 0.0
    with pytest.raises(ValueError, match="no column `word`"):
        ExactMatch("word")("", "yes", answer="yes")


NUMBERS = [
    (0.00005, "0.00005", "5e-05"), (1e16, "10000000000000000", "1e+16"), (72.0, "72", "72.00"),
    (72.0, "72.0", "7"), ("72.0", "72.0", "72"),
    (123456789012345678, "123456789012345678", "123456789012345680"), (True, "True", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "right", "wrong"), NUMBERS)
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


ODD = "tests.rewards.odd_rewards"


@pytest.mark.parametrize("function", [f"{ODD}:length", f"{ODD}.length", odd_rewards.length])
def test_a_function_or_its_path_is_a_reward(function):
    reward = as_reward(function)
    assert (reward.name, reward.weight) == ("length", 1.0)
    assert reward("", "", num_tokens=3, finish_reason="stop", other=None) == 3
    assert as_reward(reward) is reward


@pytest.mark.parametrize("path", ["no_such_module:f", f"{ODD}:no_such_name", f"{ODD}:os.sep"])
def test_a_path_that_leads_nowhere_is_refused_by_name(path):
    with pytest.raises(ValueError, match=f"The reward '{path}'"):
        Function(path)


@pytest.mark.parametrize("function", [odd_rewards.level, odd_rewards.needs_level_by_place])
def test_a_column_that_only_some_rows_have_is_missing_in_the_others(function):
    """A call would raise, for a response that no reward could then have."""
    reward = Function(function)
    reward.check_row({"level": 3})
    with pytest.raises(ValueError, match="argument: 'level'; the row has only .'answer'."):
        reward.check_row({"answer": "72"})


WRONG = [
    odd_rewards.no_columns,
    odd_rewards.swapped,
    odd_rewards.only_response,
    odd_rewards.trl_reward,
    ExactMatch,
]


@pytest.mark.parametrize("function", WRONG)
def test_a_function_that_would_get_the_prompt_for_the_response_is_refused(function):
    define = rf"def {function.__name__}\(prompt, response, \*\*columns\)"
    with pytest.raises(ValueError, match=define):
        Function(function)


def test_no_reward_may_be_written_as_null() -> None:
    assert as_list(None) == as_list(()) == []


URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GSM8K", {}),
        ("Math", {"weight": 2.0}),
        ("Function", {"function": "tests.rewards.odd_rewards:level", "weight": 0.1, "name": "l"}),
        ("Code", {"tests": "test_list", "partial": True, "isolation": "none"}),
        ("Judge", {"url": URL, "model": "m", "template": "{response}", "weight": 0.5}),
        ("RewardModel", {"url": URL, "label": 1}),
    ],
)
def test_rewards_are_configured_by_class_path(name, settings):
    parser = ArgumentParser()
    parser.add_argument("--rewards", type=list[Reward])
    given_rewards = [{"class_path": f"lrl.rewards.{name}", "init_args": settings}]
    (reward,) = parser.instantiate(parser.parse_object({"rewards": given_rewards})).rewards
    assert type(reward) is getattr(lrl.rewards, name)
    known = [name for name in settings if hasattr(reward, name) and name != "function"]
    assert [getattr(reward, name) for name in known] == [settings[name] for name in known]


@pytest.mark.parametrize(
    ("section", "kind"), [("A judge", Judge), ("A reward model", RewardModel), ("Code", Code)]
)
def test_the_settings_of_the_page_are_those_of_the_class(section, kind):
    docs = Path(__file__).parents[2] / "docs"
    pages = (docs / "rewards.md").read_text() + (docs / "judges.md").read_text()
    text = re.split("\n##", pages.partition(f"\n## {section}\n")[2])[0]
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.M)
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    known = set(inspect.signature(kind).parameters) - {"weight", "name"}
    assert named <= known and (named == known or kind is Code)


def judge(**settings):
    return Judge(**({"url": URL, "model": "m", "template": "{response}"} | settings))


@pytest.mark.parametrize(
    ("same", "others"),
    [
        ([judge(), judge(retries=9)], [judge(template="Be strict. {response}"), judge(weight=0.5)]),
        (
            [RewardModel(url=URL), RewardModel(url=URL, retries=1, timeout_s=1.0)],
            [RewardModel(url=URL, label=1), RewardModel(url=URL + "0")],
        ),
    ],
)
def test_a_checkpoint_sees_a_change_of_the_score_and_not_of_how_long_it_is_tried(same, others):
    assert len({fingerprint(reward) for reward in same}) == 1
    assert len({fingerprint(reward) for reward in [*same, *others]}) == 3
