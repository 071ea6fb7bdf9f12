"""MATH's own answers are right however they are written, and verdicts on final answers are those of
math-verify.

Covers lrl/rewards/verifiers/expression.py.
"""

import json
from pathlib import Path

import pytest
from math_verify import parse, verify

from lrl.rewards import GSM8K, Math

DATA = Path(__file__).parents[4] / "shared/data/math500/test.jsonl"
MADE_UP = [
    {"answer": answer, "solution": rf"It is $\boxed{{{answer}}}$."}
    for answer in (r"\frac{1}{2}", r"\left( 3, \frac{\pi}{2} \right)", "2x + 1")
]


def rows():
    every = [json.loads(row) for row in DATA.open()][::4] if DATA.exists() else MADE_UP
    return [{"answer": row["answer"], "solution": row["solution"]} for row in every]


def test_every_gold_answer_is_right_and_another_wrong():
    for row in rows():
        response = rf"Therefore $\boxed{{{row['answer']}}}$."
        assert Math()("", response, **row) == 1.0, row["answer"]
        assert Math()("", response, solution=row["solution"]) == 1.0, row["answer"]
        assert Math()("", row["solution"], answer=row["answer"]) == 1.0, row["answer"]
        assert Math()("", r"Therefore $\boxed{-12345.678}$.", **row) == 0.0, row["answer"]


def test_a_withdrawn_answer_does_not_count():
    for row in rows():
        right = row["answer"]
        wrong = "7" if right != "7" else "8"
        for form in (r"\boxed{%s}", r"$\boxed{%s}$", r"\fbox{%s}", "<answer>%s</answer>"):
            before, behind = form % wrong, form % right
            corrected = f"Therefore {before}. Wait, that is wrong. The answer is {behind}"
            assert Math()("", corrected, answer=right) == 1.0, corrected
            spoilt = f"Therefore {behind}. Wait, that is wrong. The answer is {before}"
            assert Math()("", spoilt, answer=right) == 0.0, spoilt


def test_a_verdict_on_the_data_is_math_verifys_own():
    answers = [row["answer"] for row in rows()]
    for place, gold in enumerate(answers):
        for other in (answers[place - 1], answers[place // 2]):
            response = rf"Therefore $\boxed{{{other}}}$."
            texts = rf"\boxed{{{gold}}}", response
            found = verify(*(parse(text, parsing_timeout=None) for text in texts))
            assert Math()("", response, answer=gold) == float(found), (gold, other)


@pytest.mark.parametrize("response", ["", "I do not know.", r"\boxed{", r"\boxed{\frac{}{}}"])
def test_a_response_that_cannot_be_read_is_wrong(response):
    assert Math()("", response, answer="2") == 0.0


UNREADABLE = [
    {}, {"solution": "no box, no number"}, {"answer": ""}, {"answer": None},
    {"answer": float("nan")}, {"answer": ["2"]}, {"answer": {"value": 2}}, {"answer": "2 3"},
]  # fmt: skip


@pytest.mark.parametrize("columns", UNREADABLE)
def test_a_row_that_cannot_be_read_is_an_error_and_not_a_zero(columns):
    for judge in (Math().check_row, lambda columns: Math()("", "2", **columns)):
        with pytest.raises(ValueError, match="row has neither|column `answer`|gold answer"):
            judge(columns)


FINAL = [
    ("2", r"so \boxed{2}, not 3"), ("2", r"\boxed{x = \boxed{2}}"),
    ("2", r"$\boxed 2$ it is, and 3 is not"), ("2", r"\boxed{2} \boxed{}"),
    ("2", "<answer>2</answer>"), ("2", r"<answer>Hence \boxed{2}, and not 3.</answer>"),
    ("2", "<answer>The answer is $2$.</answer>"), ("2", "**Answer:** 2, because 3 is too large."),
    ("2", "The answer is $2$, because $3$ is too large."),
    ("2", "The answer is $3$. No: the answer is $2$."),
    ("2", "The final answer is $3$. No: the answer is $2$."),
    ("2", "The answer is 2, since $x = 3$."), ("2", "First $x = 3$, then $y = 2$"),
    ("2", "It is 3 at first and 2 at last"), ("2", "3 + 3 = 6\n#### 2"),
    ("1, 2", r"\boxed{1} and \boxed{2}"), ("1, 2", r"$x = \boxed{1}$ or $x = \boxed{2}$"),
    ("1, 2", "The answers are $1$ and $2$."), (r"\text{Evelyn}", "The answer is Evelyn."),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "response"), FINAL)
def test_the_final_answer_is_the_one_that_the_text_commits_to(answer, response):
    assert Math()("", response, answer=answer) == 1.0
    wrong = response.replace("2", "4").replace("Evelyn", "Evelyns")
    assert Math()("", wrong, answer=answer) == 0.0


UNICODE = [
    (r"\frac{1}{2}", "½"), (r"1\frac{1}{2}", "1½"), ("x^2", "x²"), ("x^{-10}", "x⁻¹⁰"), ("52_8", "52₈"),
    (r"\sqrt{2}", "√2"), (r"\sqrt{x+1}", "√(x+1)"), (r"\frac{\sqrt{3}}{3}", "√3/3"), (r"\sqrt[3]{2}", "∛2"),
    (r"(2,\infty)", "(2, ∞)"), (r"90^\circ", "90°"), ("90", "90°"), ("-5", "−5"), ("12", "3×4"), ("12", "3·4"),
    ("2", "6÷3"), (r"2\pi", "2π"), (r"1 \pm \sqrt{19}", "1 ± √19"), (r"x \le 5", "x ≤ 5"), (r"\alpha", "α"),
    (r"(0,9) \cup (9,36)", "(0,9) ∪ (9,36)"), (r"x \in [-2,7]", "x ∈ [-2,7]"), (r"\emptyset", "∅"), ("5", "５"),
    (r"\mathbb{R}", "ℝ"), ("x^2+1", "𝑥²+1"), ("3/4", "3⁄4"), (r"\lfloor x \rfloor", "⌊x⌋"), ("36", "€36"),
    (r"12\pi", "12π cm²"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "response"), UNICODE)
def test_mathematics_in_unicode_is_the_same_as_in_latex(answer, response):
    assert Math()("", rf"\boxed{{{response}}}", answer=answer) == 1.0
    assert Math()("", rf"\boxed{{{answer}}}", answer=response) == 1.0
    assert Math()("", rf"\boxed{{{response}}}", answer="17/3") == 0.0


PI = ["2pi", "2*pi", r"2 \cdot pi", "pi+pi", r"\frac{4pi}{2}", r"\text{pi}2", "2π", r"2\pi"]


SAME_AND_OTHER = [
    *((r"2\pi", response, r"3\pi") for response in PI), (r"\frac{1}{2}", "0.5", "2"),
    ("2x+1", "1+2x", "1-2x"), (3, "x = 3", "x = 4"), (r"\sqrt{8}", r"2\sqrt{2}", "4"),
    (r"\text{east}", "East", "seat"), ("east", r"\textbf{east}", r"\text{seat}"),
    ("silent", "silent.", "listen"), ("no solution", r"\text{No solution}", "no solutions"),
    ("dog, cat", "cat and dog", "god, act"), (r"\text{(C)}", "C", "(D)"),
    (r"\text{(C)}", r"\textbf{(C)}\ 25", r"\textbf{(D)}\ 25"), ("C", r"\text{(C)}", r"\text{(D)}"),
    ("True", "true", "False"), ("infinity", r"\infty", r"-\infty"), ("no", "No.", "on"),
    (r"\text{even}", r"\text{even}.", r"\text{evne}."),
    ("east", r"x = \text{east}", r"x = \text{seat}"), ("no", r"\text{no}", r"n \cdot o"),
    ("east", r"\text{the East}", "s e a t"), ("the derivative", "derivative", "the integral"),
    ("xy", "yx", "xz"),  # two letters are a product
    (r"\text{Ärger}", "ärger", "Ärgre"), ("3t", "t*3", "3"), (r"2\pi r h", r"2\pi h r", r"2\pi r"),
    ("6h", "6 h", "6t"), ("15", "15m", "15x"), ("15", "15 cm^2", "15 + cm^2"),
    ("15", r"15\,\text{cm}^2", r"\text{15 or 16}"), (r"15\mbox{ cm}^2", "15", "16"),
    ("30 degrees", r"30^\circ", "31"),
    ("5000000", r"5\text{ million} \cdot 0 + 5000000", r"5\text{ million}"),
    ("5", r"\text{5 apples}", r"5 \text{ million}"), ("52_8", "52_{8}", "52_9"),
    ("12", "12", "5 7"),  # which math-verify adds
    ("35", "5(7)", "12"), ("35", r"(5)\left(7\right)", "(5)8"),
    ("12", r"\log_2(8) \cdot 4", "5(7)"), ("2(x+1)", "2x+2", "x+3"),
    (r"1\frac{2}{3}", "1 2/3", "1"), ("58500", "58 500", r"58,50"), ("58500", r"58\,500", "58.5"),
    ("1500", "1.5e3", "1.5"), ("0.00005", r"5 \times 10^{-5}", "0.0000504"),
    (0.00005, "0.00005", "5"), (1e16, "10000000000000000", "1"),
    (".0000672", "0.0000672", "0.0000671"), ("1/3", "0.333333", "0.33"), ("5", "5.", "> 5"),
    ("x^2", "x**2", "x*2"), (r"\emptyset", r"\varnothing", "0"), ("(1,2)", "(1, 2)", "(2,1)"),
    ("[1,2)", r"\left[1,2\right)", "[1,2]"), ("1,-2", r"\{-2, 1\}", "-2"), (r"50\%", "0.5", "0.05"),
    ("5 meters", "5", "5 feet"), ("5 meters", "5 m", r"5\text{ ft}"),
    (r"3\text{ hours}", "3 hr", "3 min"),
    (r"5\text{ square metres}", "5 m^2", r"5 \textnormal{ square miles}"),
    ("12 apples", "12 red apples", "13 apples"),
    ("125", r"125\textnormal{ miles}", r"126\textnormal{ miles}"),
    (r"125\textsf{ miles}", r"125\ \mathsf{mi}", "125 kilometers"),
    (r"1 \le x < 2", "[1,2)", "[1,2]"), ("[1,2)", r"1 \le x < 2", "1 < x < 2"),
    (r"(2,\infty)", "x > 2", r"x \ge 2"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "same", "other"), SAME_AND_OTHER)
def test_words_units_separators_and_forms_do_not_matter_and_values_do(answer, same, other):
    assert Math()("", rf"\boxed{{{same}}}", answer=answer) == 1.0
    assert Math()("", rf"\boxed{{{other}}}", answer=answer) == 0.0


DENIALS = [
    "It is not 42.", "The answer is 7, not 42.", "The answer is $7$, not $42$.", "It can't be $42$.", "7 (not 42)",
    r"The answer is not \boxed{42}.", "We rule out 42.", "The answer is definitely not 42, though.", "#### not 42",
    "6 * 7 = 42. The answer is not 42.", "7 rather than 42", "neither 42 nor 7", "42 is not the answer.", "42 is wrong",
    "Is it 42? No.", "<answer>anything but 42</answer>", "The answer isn’t equal to 42", r"not \boxed{\frac{84}{2}}",
]  # fmt: skip


@pytest.mark.parametrize("reward", [Math(), GSM8K()])
@pytest.mark.parametrize("response", DENIALS)
def test_what_a_response_denies_is_not_its_answer(reward, response):
    assert reward("", response, answer="42") == 0.0


@pytest.mark.parametrize("reward", [Math(), GSM8K()])
@pytest.mark.parametrize(
    "response",
    [
        *("The answer is 42, not 7.", "It is 42 rather than 7", "not 7 but 42", "7 is wrong. 42"),
        *("It isn't 7. It is 42.", "I am not sure, but 42", r"7 is not it: \boxed{42}"),
        *("Since 7 is not 2, it is 42.", "He can buy no more than 42"),
        r"\boxed{42}, which is not 42.5",
    ],
)
def test_what_a_response_says_beside_a_denial_is_its_answer(reward, response):
    assert reward("", response, answer="42") == 1.0


SENTENCES = [
    ("34", "Final Answer: The largest $n$ is 34."),
    ("34", "Final Answer: The largest $n$ such that $n^2 < 1200$ is $34$, which is $2$ times 17."),
    ("34", "**Final Answer**\n\nThe largest $n$ is **34**."),
    ("34", "The answer is that $n$ is equal to 34"), ("34", "Final answer: $n$ is 34."),
    ("34", "Final answer: the number $34$, which is $2$ times 17."), ("yes", "Yes."),
    ("yes", "Each side is even.\n**Yes**"), ("no", "<answer>No.</answer>"),
    ("5 meters", "It is $5$ meters long."), (r"x \ne 42", r"The answer is $x \ne 42$."),
    (r"\text{not }5", r"\boxed{\text{not }5}"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "response"), SENTENCES)
def test_an_answer_in_a_sentence_is_what_the_sentence_says_and_not_what_it_names(answer, response):
    assert Math()("", response, answer=answer) == 1.0


@pytest.mark.parametrize("response", ["5 feet", "The answer is 5 feet.", "It is $5$ feet long."])
def test_another_unit_in_a_sentence_is_wrong(response):
    assert Math()("", response, answer="5 meters") == 0.0


@pytest.mark.parametrize("part", ["not ", "1.2,", r"\boxed{", "$a$ is ", "not 42 or "])
def test_the_search_for_an_answer_takes_a_time_in_proportion_to_the_text(part):
    """With a search of every place from every place it would never end."""
    for reward in (Math(give_up_s=0.2), GSM8K()):
        assert reward("", part * 10_000, answer="7") == 0.0
