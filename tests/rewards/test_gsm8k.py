"""GSM8K's own answers are right, others are wrong, and the notation of a number does not matter."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.rewards import GSM8K
from lrl.rewards.gsm8k import final_number

DATA = Path(__file__).parents[3] / "shared/data/gsm8k/test.jsonl"
MADE_UP = [
    "Two and two make 2+2=<<2+2=4>>4.\n#### 4",
    "She pays $1,000 and $250, so 1000+250=<<1000+250=1250>>1250.\n#### 1,250",
    "He owes 3 and has 1: 1-3=<<1-3=-2>>-2.\n#### -2",
]


def gold_answers():
    return [json.loads(row)["answer"] for row in DATA.open()] if DATA.exists() else MADE_UP


def test_every_gold_answer_is_right_and_its_neighbour_wrong():
    reward = GSM8K()
    for answer in gold_answers():
        number = Decimal(answer.rpartition("#### ")[2].replace(",", ""))
        assert reward("", answer, answer=answer) == 1.0
        for response in (rf"So it is $\boxed{{{number}}}$.", f"#### {number}", f"The answer is {number:,}."):
            assert reward("", response, answer=answer) == 1.0, response
        for response in (
            rf"So it is $\boxed{{{number + 1}}}$.",
            f"#### {number * 10 + 1}",
            f"Not {number}, {number - 1}",
        ):
            assert reward("", response, answer=answer) == 0.0, response


@given(
    st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "{}.0", "{:,}.00"]), st.sampled_from(["", ".", "%"])
)
def test_the_notation_of_a_number_does_not_matter(number, style, end):
    written = style.format(number) + end
    latex = written.replace(",", "{,}").replace("%", r"\%")
    for text in (written, f"It is **{written}**", f"5 + 3\n#### {written}", rf"7 or \(\boxed{{{latex}}}\)"):
        assert final_number(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("$18", 18),
        ("-$5", -5),
        (r"\boxed{-\$5.50}", Decimal("-5.5")),
        (r"\boxed{18 \text{ dollars}}", 18),
        (r"\boxed{\text{18}}", 18),
        (r"\boxed{5 \text{ km}^2}", 5),
        (r"\boxed{5 \mathrm{m}^{-3}}", 5),
        (r"\boxed{1 000}", 1000),
        (r"\boxed{\$12 345 678.90}", Decimal("12345678.9")),
        (r"\boxed{3 4}", None),
        (r"\boxed{1234 567}", None),
        ("first 1 000 and then 200", 200),
        (r"\boxed{2 + 3 = 5}", 5),
        (r"first \boxed{1}, no: \boxed{2}, of 3", 2),
        ("#### 72 apples, 3 each", 72),
        ("20-10", 10),
        ("1,2 and 3,4", 4),
        ("half of it is .5", Decimal("0.5")),
        ("no number", None),
        (r"7, so \boxed{seven}", None),
        (r"\boxed{\frac{1}{2}}", None),
        (r"12, so \boxed{1", 1),
        ("", None),
    ],
)
def test_the_final_number_is_the_one_that_the_text_commits_to(text, number):
    assert final_number(text) == number


@given(st.text(alphabet="0123456789,.-$#\\boxed{}= \n%"))
def test_every_text_gets_a_reward(text):
    assert GSM8K()("", text, answer="72") in (0.0, 1.0)


@pytest.mark.parametrize("columns", [{}, {"answer": "unknown"}])
def test_a_row_without_a_number_is_an_error_and_not_a_zero(columns):
    with pytest.raises(ValueError, match="column `answer`"):
        GSM8K()("", "72", **columns)


@pytest.mark.parametrize("answer", [72, 72.0, "72", "$72.00"])
def test_the_gold_answer_may_be_a_bare_number(answer):
    assert GSM8K()("", "so 72.", answer=answer) == 1.0
