"""GSM8K's own answers are right, others are wrong, and the notation of a number does not matter."""

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.rewards import GSM8K
from lrl.rewards.verifiers.final_answer import final_number

DATA = Path(__file__).parents[4] / "shared/data/gsm8k/test.jsonl"
MADE_UP = [
    "Two and two make 2+2=<<2+2=4>>4.\n#### 4",
    "She pays $1,000 and $250, so 1000+250=<<1000+250=1250>>1250.\n#### 1,250",
    "He owes 3 and has 1: 1-3=<<1-3=-2>>-2.\n#### -2",
]


PARTS = [
    *(" ", r"\boxed{", "}", "{", r"\frac", "1", "10^", "####", "/", "=", r"\times", "-"),
    *("<answer>", "$", r"\text{", "0"),
]


def gold_answers():
    return [json.loads(row)["answer"] for row in DATA.open()] if DATA.exists() else MADE_UP


def test_every_gold_answer_is_right_and_its_neighbour_wrong():
    reward = GSM8K()
    for answer in gold_answers():
        reward.check_row({"answer": answer})
        number = Decimal(answer.rpartition("#### ")[2].replace(",", ""))
        assert reward("", answer, answer=answer) == 1.0
        boxed = r"So it is $\boxed{%s}$."
        for response in (boxed % number, f"#### {number}", f"The answer is {number:,}."):
            assert reward("", response, answer=answer) == 1.0, response
        others = (boxed % (number + 1), f"#### {number * 10 + 1}", f"Not {number}, {number - 1}")
        for response in others:
            assert reward("", response, answer=answer) == 0.0, response


@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["{}", "{:,}", "{}.0", "{:,}.00"]),
    st.sampled_from(["", ".", "%"]),
)
def test_the_notation_of_a_number_does_not_matter(number, style, end):
    written = style.format(number) + end
    latex = written.replace(",", "{,}").replace("%", r"\%")
    forms = (written, f"It is **{written}**", f"5 + 3\n#### {written}")
    for text in (*forms, rf"7 or \(\boxed{{{latex}}}\)"):
        assert final_number(text) == number


FINAL = [
    ("$18", 18), ("-$5", -5), (r"\boxed{-\$5.50}", Decimal("-5.5")),
    (r"\boxed{18 \text{ dollars}}", 18), (r"\boxed{\text{18}}", 18), (r"\boxed{5 \text{ km}^2}", 5),
    (r"\boxed{5 \mathrm{m}^{-3}}", 5), (r"\boxed{1 000}", 1000),
    (r"\boxed{\$12 345 678.90}", Decimal("12345678.9")), (r"\boxed{3 4}", None),
    (r"\boxed{1234 567}", None), ("first 1 000 and then 200", 200), (r"\boxed{2 + 3 = 5}", 5),
    (r"first \boxed{1}, no: \boxed{2}, of 3", 2), ("#### 72 apples, 3 each", 72), ("20-10", 10),
    ("1,2 and 3,4", 4), ("half of it is .5", Decimal("0.5")), ("no number", None),
    (r"7, so \boxed{seven}", None), (r"\boxed{\frac{3}{2}}", Fraction(3, 2)),
    (r"\boxed{-\dfrac{3}{2}}", Fraction(-3, 2)), (r"\boxed{1\frac{1}{2}}", Fraction(3, 2)),
    (r"\boxed{1½}", Fraction(3, 2)), (r"\boxed{3/2}", Fraction(3, 2)),
    ("so she needs 1 1/2 cups", Fraction(3, 2)), (r"\boxed{\frac{x}{2}}", None),
    (r"\boxed{\frac{3}{0}}", None), ("on 5/6/2020", 2020), (r"\boxed{5 \times 10^2}", 500),
    (r"\boxed{5 \cdot 10^{-2}}", Fraction(1, 20)), (r"\boxed{5×10²}", 500), (r"\boxed{10^3}", 1000),
    (r"\boxed{1.5e3}", 1500), (r"\boxed{2^5}", None), (r"\boxed{\sqrt{16}}", None),
    (r"\boxed{5!}", None), (r"\boxed{9\pi}", None), (r"\boxed{1 million}", None),
    (r"\boxed{72 \text{ clips (48+24)}}", 72), (r"\boxed{\text{72 clips}}", 72),
    (r"\boxed{\text{48 + 24}}", None), (r"\boxed{72 m^2}", 72), (r"\boxed{72 m2}", 72),
    (r"\boxed{72 \text{CO}_2}", 72), (r"\boxed{72^\circ}", 72), (r"\boxed{- 72}", -72),
    ("an area of 72 m^2", 72), ("an area of 72 m²", 72), (r"\fbox{72}, not 3", 72),
    ("<answer>72</answer>, not 3", 72), ("#### **72** of 80", 72),
    ("#### Answer: 72. There are 3 more.", 72), ("#### Step 3: 70 + 2 = 72", 72), ("####.", None),
    (r"12, so \boxed{1", 1), ("", None), (r"\boxed{\text{not }72}", None),
    (r"\boxed{n \ne 72}", None), (r"\boxed{>72}", None), ("3 ≠ 72", 3),
    (r"\boxed{72 \textsf{ m2}}", 72), ("3 + 69 = 72. #### not 72", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "number"), FINAL)
def test_the_final_number_is_the_one_that_the_text_commits_to(text, number):
    assert final_number(text) == number


@given(
    st.text(alphabet="0123456789,.-$#\\boxed{}= \n%/^½²")
    | st.lists(st.sampled_from(PARTS)).map("".join)
)
def test_every_text_gets_a_reward(text):
    assert GSM8K()("", text, answer="72") in (0.0, 1.0)


BAD = [
    *("", "unknown", "3,5", "12:30", "10 to 12", "10-12", "2^10", "x=5, y=6", "3/0", "#### "),
    *(
        "72 km in 2 h",
        "1 million",
        "So 5 + 2 = 7.",
        "5 + 2 = 7 #### 7 (of 9)",
        r"\sqrt{16}",
        r"9\pi",
    ),
    *(None, True, float("nan"), float("inf"), [72], ["3", "72"], {"value": 72}, b"72"),
]


@pytest.mark.parametrize("columns", [{}, *({"answer": answer} for answer in BAD)])
def test_a_reference_that_is_not_one_number_is_an_error_and_not_a_zero(columns):
    for judge in (GSM8K().check_row, lambda columns: GSM8K()("", "72", **columns)):
        with pytest.raises(ValueError, match="column `answer`"):
            judge(columns)


REFERENCES = [
    (72, "72", "7"), (72.0, "72", "0"), ("$72.00", "72", "0"), (0.00005, "0.00005", "5"),
    (1e-7, "0.0000001", "7"), (1e16, "10000000000000000", "16"), (Decimal("1E+3"), "1000", "3"),
    (numpy.float32(0.5), "0.5", "5"), (numpy.int64(72), "72", "2"), ("3/4", "0.75", "4"),
    (r"\frac{3}{4}", "3/4", "4"), ("#### 1/2", "0.5", "1"), ("2 1/2", "2.5", "2"),
    ("5 m^2", "5", "2"), ("1.5e3", "1500", "3"), (r"so 3 + 4 = 7, \boxed{7}", "7", "4"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "right", "wrong"), REFERENCES)
def test_a_reference_is_one_number_however_it_is_written(answer, right, wrong):
    GSM8K().check_row({"answer": answer})
    assert GSM8K()("", rf"\boxed{{{right}}}", answer=answer) == 1.0
    assert GSM8K()("", rf"\boxed{{{wrong}}}", answer=answer) == 0.0
