"""A number that is too large is found in its text, and any other passes."""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lrl.rewards.verifiers.magnitude import MAX_BITS, MAX_DEPTH, TooLargeError, check_magnitude

DATA = Path(__file__).parents[4] / "shared/data/math500/test.jsonl"
MADE_UP = [
    {
        "answer": r"\left( 3, \frac{\pi}{2} \right)",
        "solution": r"As $2^{10} = 1024$, it is $\boxed{1024}$.",
    }
]

HUGE = [
    "2^{2^{40}}", "10^{10^9}", "1000000!", "(10^9)!", "1,000,000!", r"1\,000\,000!", "3!!!!", "10**10**9",
    "9^9^9^9", "((2^{10})^{10^5})^{10^5}", r"\frac{1}{2^{2^{40}}}", "2^{-2^{40}}", r"\sqrt{2^{2^{40}}}",
    r"\sin(10^{10^9})", r"\log 10^{10^9}", r"\left(10\right)^{10^{9}}", "(2^{2^{40}}, 5)", "[0, 10^{10^{10^{10}}})",
    r"\{2^{2^{40}}, 3\}", r"\begin{pmatrix} 2^{2^{40}} & 1 \\ 1 & 1 \end{pmatrix}", r"\gcd(10^{10^9}, 5)",
    r"\binom{1000000000}{500000000}", r"\Gamma(1000000)", "0.5^{1000000}", "(1+i)^{1000000}",
    r"\lfloor 10^{10^9}/3 \rfloor", "(2x)^{10^9}", r"\operatorname{eye}(20000)", "2^" * 500 + "2",
    "(" * 500 + "1" + ")" * 500, "{" * 500 + "1" + "}" * 500,
]  # fmt: skip
FINE = [
    "", "7", "100!", "2^{1000}", "3^{100000}", "x^{2005} + 1", "x^{10^9}", "e^{-3.14159}", "10^{0.5}", "2^{10/3}",
    r"2^{\frac{1000}{3}}", "2^{1005 + 1000}", r"\frac{100!}{98! \cdot 2!}", "1000(1.05)^{10}", "(1 + 0.05)^{360}",
    "(x+1)^{100}",
    r"\left(\frac{3}{4}\right)^{2005}", r"90^{\circ}", r"\sum_{k=1}^{1000000} k^2", r"\int_0^{1000000} x dx",
    "x_{1000000}!",
    "10101_{2}", r"\binom{100}{50}", r"\text{10^9^9}", "1,000,000", "5!", "[0,1)" + r"\cup [0,1)" * 50, "}" * 500,
    "^", "!",
]  # fmt: skip


def is_too_large(text):
    try:
        check_magnitude(text)
    except TooLargeError:
        return True
    return False


@pytest.mark.parametrize("text", HUGE)
def test_an_expression_too_large_to_compute_is_seen_from_its_text(text):
    assert is_too_large(text)


@pytest.mark.parametrize("text", FINE)
def test_an_expression_that_can_be_computed_is_accepted(text):
    assert not is_too_large(text)


def test_no_answer_and_no_solution_of_the_data_is_too_large():
    for row in [json.loads(row) for row in DATA.open()] if DATA.exists() else MADE_UP:
        assert not is_too_large(row["answer"]) and not is_too_large(row["solution"])


EXPRESSIONS = st.recursive(
    st.integers(0, 40).map(lambda number: (str(number), Fraction(number))),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: worked_out("({}) + ({})", two, lambda a, b: a + b)),
        st.tuples(inner, inner).map(
            lambda two: worked_out(r"({}) \cdot ({})", two, lambda a, b: a * b)
        ),
        st.tuples(inner, inner).map(
            lambda two: worked_out(r"\frac{{{}}}{{{}}}", two, lambda a, b: a / b)
        ),
        st.tuples(inner, inner).map(lambda two: worked_out("({})^{{{}}}", two, power)),
        st.tuples(inner).map(lambda one: worked_out("({})!", one, factorial)),
    ),
    max_leaves=8,
)
"""A text and its value; None if it is too large to be worked out here."""
FAR_TOO_MANY = 2**21


def worked_out(form, parts, rule):
    texts, values = zip(*parts, strict=True)
    try:
        value = None if None in values else rule(*values)
    except ZeroDivisionError:
        value = None
    return form.format(*texts), value


def power(base, exponent):
    if exponent.denominator != 1 or bits(base) * abs(exponent) > FAR_TOO_MANY:
        return None
    return base ** int(exponent)


def factorial(n):
    return Fraction(math.factorial(int(n))) if n.denominator == 1 and 0 <= n < 50_000 else None


def bits(value):
    return value.numerator.bit_length() + value.denominator.bit_length()


@given(EXPRESSIONS)
def test_no_accepted_number_is_larger_than_the_limit(expression):
    text, value = expression
    assume(value is not None)
    try:
        check_magnitude(text)
    except TooLargeError:
        return
    terms = 1 + text.count("+")  # a sum of fractions has the bits of all of them
    assert bits(value) <= terms * MAX_BITS


@given(
    st.text(alphabet="0123456789.,^!{}()[]+-*/=x_ e\\E")
    | st.lists(st.sampled_from(HUGE + FINE)).map(" ".join)
)
def test_no_text_is_an_error(text):
    try:
        check_magnitude(text)
    except TooLargeError as error:
        assert str(MAX_BITS) in str(error) or str(MAX_DEPTH) in str(error)
