"""The quickstart's task and its reward."""

import random

import pytest

from lrl.quickstart.task import correct, held_out, problems, tuning, worked


def prompts(rows: list[dict[str, str]]) -> set[str]:
    return {row["prompt"] for row in rows}


def test_the_three_sets_are_disjoint_never_move_and_together_are_all_problems() -> None:
    random.seed(1)  # a run's seed must not reach the split
    assert [rows()[0]["prompt"] for rows in (problems, tuning, held_out)] == [
        "58+96=",
        "87+26=",
        "87+41=",
    ]
    sets = [prompts(problems()), prompts(tuning()), prompts(held_out())]
    assert [len(rows) for rows in sets] == [7100, 500, 500]
    assert len(set.union(*sets)) == 8100


def test_every_answer_is_the_sum_and_every_working_leads_to_it() -> None:
    for row in problems() + tuning() + held_out():
        left, right = row["prompt"].rstrip("=").split("+")
        units, tens = (int(column.split("=")[1]) for column in worked(row["prompt"]).split(","))
        assert int(row["answer"]) == int(left) + int(right) == tens * 10 + units % 10
        assert (
            correct(
                response=f"{worked(row['prompt'])}>{row['answer']}", finish_reason="stop", **row
            )
            == 1.0
        )


@pytest.mark.parametrize(
    ("response", "finish_reason", "reward"),
    [
        (">85", "stop", 1.0),
        ("7+8=15,4+3+1=8>85", "stop", 1.0),
        (">75>85", "stop", 1.0),
        (">85", "length", 0.0),
        (">85", "abort", 0.0),
        (">85>75", "stop", 0.0),
        ("85", "stop", 0.0),
        (">085", "stop", 0.0),
        (">85,", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_only_a_finished_right_answer_is_rewarded(
    response: str, finish_reason: str, reward: float
) -> None:
    assert correct("47+38=", response, answer="85", finish_reason=finish_reason, level=1) == reward
