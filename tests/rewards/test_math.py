"""MATH's own answers are right however they are written, and verdicts are those of math-verify."""

import json
import threading
from pathlib import Path

import pytest
from math_verify import parse, verify

from lrl.rewards import Math

DATA = Path(__file__).parents[3] / "shared/data/math500/test.jsonl"
MADE_UP = [
    {"answer": r"\frac{1}{2}", "solution": r"Half: $\boxed{\frac{1}{2}}$."},
    {"answer": r"\left( 3, \frac{\pi}{2} \right)", "solution": r"$\boxed{\left( 3, \frac{\pi}{2} \right)}$"},
    {"answer": "2x + 1", "solution": r"It is $\boxed{2x + 1}$"},
]


def rows():
    every_fourth = [json.loads(row) for row in DATA.open()][::4] if DATA.exists() else MADE_UP
    return [{"answer": row["answer"], "solution": row["solution"]} for row in every_fourth]


def test_every_gold_answer_is_right_and_another_wrong():
    for row in rows():
        response = rf"Therefore $\boxed{{{row['answer']}}}$."
        assert Math()("", response, **row) == 1.0, row["answer"]
        assert Math()("", response, solution=row["solution"]) == 1.0, row["answer"]
        assert Math()("", r"Therefore $\boxed{-12345.678}$.", **row) == 0.0, row["answer"]


def test_a_verdict_on_the_data_is_math_verifys_own():
    answers = [row["answer"] for row in rows()]
    for place, gold in enumerate(answers):
        for other in (answers[place - 1], answers[place // 2]):
            response = rf"Therefore $\boxed{{{other}}}$."
            found = verify(parse(rf"\boxed{{{gold}}}", parsing_timeout=None), parse(response, parsing_timeout=None))
            assert Math()("", response, answer=gold) == float(found), (gold, other)


def test_every_solution_of_the_data_is_right():
    for row in rows():
        assert Math()("", row["solution"], answer=row["answer"]) == 1.0, row["answer"]


@pytest.mark.parametrize(
    "response", ["2pi", "2*pi", r"2 \cdot pi", "pi+pi", r"\frac{4pi}{2}", r"\text{pi}2", "2π", r"2\pi"]
)
def test_pi_may_be_written_in_letters(response):
    assert Math()("", rf"\boxed{{{response}}}", answer=r"2\pi") == 1.0
    assert Math()("", rf"\boxed{{{response}}}", answer=r"3\pi") == 0.0


@pytest.mark.parametrize(
    ("answer", "response"),
    [(r"\frac{1}{2}", "0.5"), ("2x+1", r"$\boxed{1+2x}$"), (3, "so $x = 3$"), (r"\sqrt{8}", r"\boxed{2\sqrt{2}}")],
)
def test_equal_expressions_in_different_notations_are_equal(answer, response):
    assert Math()("", response, answer=answer) == 1.0


@pytest.mark.parametrize("response", ["", "I do not know.", r"\boxed{", r"\boxed{\frac{}{}}"])
def test_a_response_that_cannot_be_read_is_wrong(response):
    assert Math()("", response, answer="2") == 0.0


@pytest.mark.parametrize("columns", [{}, {"solution": "no box, no number"}])
def test_a_row_that_cannot_be_read_is_an_error_and_not_a_zero(columns):
    with pytest.raises(ValueError, match="row has neither"):
        Math()("", "2", **columns)


def test_it_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(Math()("", r"\boxed{2}", answer="2")))
    thread.start()
    thread.join(120)
    assert found == [1.0]
