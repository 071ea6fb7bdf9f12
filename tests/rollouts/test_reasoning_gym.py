"""Prompts and scorers of reasoning-gym: on a stand-in with three tasks, and on the package itself
where it is installed."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from lrl.errors import ConfigError
from lrl.rewards import GaveUp
from lrl.rewards import ReasoningGym as Score
from lrl.rewards import simple as scorers
from lrl.rollouts.reasoning_gym import ReasoningGym


@dataclass
class Range:
    """Settings of the stand-in's tasks."""

    seed: int | None = None
    size: int = 500
    least: int = 0
    most: int = 9999

    def validate(self) -> None:
        assert self.least <= self.most, "least must be <= most"


class Successor:
    """What comes after a number?"""

    def __init__(self, config: Range) -> None:
        config.validate()
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.config.seed is not None and index < self.config.size
        number = random.Random(self.config.seed + index).randint(
            self.config.least, self.config.most
        )
        return {
            "question": f"After {number}?",
            "answer": str(number + 1),
            "metadata": {"least": self.config.least, "keys": {1, 2}},
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        if entry["metadata"]["least"] != self.config.least:
            raise RuntimeError("the scorer has other settings than the item")
        return 1.0 if int(answer or "x") == int(entry["answer"]) else 0.25


class Broken(Successor):
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        raise RuntimeError("broken scorer")


TASKS = {"after": (Successor, Range), "later": (Successor, Range), "broken": (Broken, Range)}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = ModuleType("reasoning_gym.factory")
    factory.DATASETS = TASKS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "reasoning_gym", ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    scorers._scorer.cache_clear()


def rows(*arguments: Any, **settings: Any) -> list[dict[str, Any]]:
    prompts = ReasoningGym(*arguments, **settings)
    prompts.read()
    return prompts.rows


def score(row: dict[str, Any], response: str) -> float:
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return Score()("a template's words", response, **columns)


def test_no_question_is_trained_and_held_out_although_a_task_repeats_its_questions(
    stand_in: None,
) -> None:
    tasks = {"after": {"most": 40}}
    trained = {row["prompt"] for row in rows(tasks, size=300)}
    held_out = {row["prompt"] for row in rows(tasks, size=50, split="test")}
    assert len(trained) + len(held_out) == 41 and not trained & held_out


def test_a_mix_has_the_shares_of_its_weights_and_says_of_each_row_its_task(stand_in: None) -> None:
    mixed = rows({"after": {"weight": 3, "least": 5}, "later": None}, size=40)
    names = [row["task"] for row in mixed]
    assert (names.count("after"), names.count("later"), len(names)) == (30, 10, 40)
    assert mixed[0]["settings"] == {"least": 5} and mixed[-1]["settings"] == {}
    assert ReasoningGym(["after", "later"]).name == "reasoning_gym"


def test_a_response_is_judged_by_the_scorer_of_its_task_with_the_settings_of_its_row(
    stand_in: None,
) -> None:
    for row in rows({"after": {"least": 5}, "later": {}}, size=10):
        right = row["answer"]
        assert score(row, right) == score(row, f"So <answer> {right} </answer>.") == 1.0
        assert score(row, "7<answer>-1</answer>") == 0.25
        unread = score(row, f"It is {right}, I think.")
        assert isinstance(unread, GaveUp) and unread == 0.0 and "ValueError" in unread.reason


def test_a_scorer_that_fails_at_its_own_right_answer_is_an_error_and_not_a_reward(
    stand_in: None,
) -> None:
    (row,) = rows("broken", size=1)
    with pytest.raises(RuntimeError, match="broken scorer"):
        score(row, "5")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tasks": "aftr"}, "no task 'aftr'. Did you mean after?"),
        ({"tasks": {"after": {"most": -1}}}, "task after .*least must be <= most"),
        ({"tasks": {"after": {"most": 0}}, "split": "test"}, "gives 0 of the 1000 rows"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(
    stand_in: None, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        rows(**arguments)


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_right_answers_of_the_package_score_1_and_other_words_less() -> None:
    tasks = {"chain_sum": {"max_terms": 3}, "spell_backward": {}, "prime_factorization": {}}
    for row in rows(tasks, size=30):
        assert score(row, f"<answer>{row['answer']}</answer>") == 1.0
        # spell_backward gives a part for each letter that happens to be in its place.
        assert score(row, "I do not know.") < 0.5
