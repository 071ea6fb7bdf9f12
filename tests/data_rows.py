"""Rows for tests: real ones where a copy of the data lies beside the checkout, else made-up ones of
the same form."""

import json
from itertools import cycle, islice
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "shared" / "data"

GSM8K = [
    {
        "question": (
            "Ann picks 3 baskets of 12 pears and gives away 9 pears. How many pears are left?"
        ),
        "answer": (
            "She picks 3*12=<<3*12=36>>36 pears.\nShe keeps 36-9=<<36-9=27>>27 pears.\n#### 27"
        ),
    },
    {
        "question": (
            "A ticket costs $1,250 and a meal costs $40. How much do two of each cost in dollars?"
        ),
        "answer": (
            "One of each costs 1250+40=$<<1250+40=1290>>1290.\nTwo cost "
            "2*1290=$<<2*1290=2580>>2,580\n#### 2,580"
        ),
    },
    {
        "question": (
            "It was 4 degrees at noon and 11 degrees colder at night. How many degrees was it at "
            "night?"
        ),
        "answer": "At night it was 4-11=<<4-11=-7>>-7 degrees.\n#### -7",
    },
]

MATH = [
    {
        "problem": "What is the sum of the roots of $x^2 - 5x + 6 = 0$?",
        "solution": "By Vieta the sum is $\\boxed{5}$.",
        "answer": "5",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    {
        "problem": (
            "A fair coin is thrown twice. How likely are two heads? Answer with a common fraction."
        ),
        "solution": (
            "Each throw is independent, so it is $\\frac12\\cdot\\frac12=\\boxed{\\frac{1}{4}}$."
        ),
        "answer": "\\frac{1}{4}",
        "subject": "Counting & Probability",
        "level": 3,
        "unique_id": "test/counting_and_probability/2.json",
    },
    {
        "problem": (
            "Write the point $(0,2)$ in polar form $(r,\\theta)$ with $r > 0$ and $0 \\le \\theta "
            "< 2\\pi$."
        ),
        "solution": (
            "The point is 2 above the origin: $\\boxed{\\left( 2, \\frac{\\pi}{2} \\right)}$."
        ),
        "answer": "\\left( 2, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/3.json",
    },
]


def gsm8k_rows(n: int) -> list[dict[str, Any]]:
    """n rows of GSM8K's training split: question, answer."""
    return _rows(DATA / "gsm8k" / "train.jsonl", GSM8K, n)


def math_rows(n: int) -> list[dict[str, Any]]:
    """n rows of MATH-500: problem, solution, answer, subject, level, unique_id."""
    return _rows(DATA / "math500" / "test.jsonl", MATH, n)


def _rows(path: Path, made_up: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    if not path.exists():
        return list(islice(cycle(made_up), n))
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in islice(file, n)]
