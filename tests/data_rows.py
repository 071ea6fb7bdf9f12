"""Made-up rows in the form of GSM8K and MATH."""

from itertools import cycle, islice
from typing import Any

GSM8K = [
    {
        "question": "Ann picks 3 baskets of 12 pears and gives away 9 pears. How many are left?",
        "answer": "She picks 3*12=<<3*12=36>>36 pears.\nShe keeps 36-9=<<36-9=27>>27 pears.\n#### 27",
    },
    {
        "question": "A ticket costs $1,250 and a meal costs $40. What do two of each cost?",
        "answer": "One of each: $<<1250+40=1290>>1290.\nTwo cost $<<2*1290=2580>>2,580\n#### 2,580",
    },
    {
        "question": "It was 4 degrees at noon and 11 degrees colder at night. How many then?",
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
    },
    {
        "problem": "A fair coin is thrown twice. How likely are two heads? Give a common fraction.",
        "solution": "It is $\\frac12\\cdot\\frac12=\\boxed{\\frac{1}{4}}$.",
        "answer": "\\frac{1}{4}",
        "subject": "Counting & Probability",
        "level": 3,
    },
]


def gsm8k_rows(n: int) -> list[dict[str, Any]]:
    return list(islice(cycle(GSM8K), n))


def math_rows(n: int) -> list[dict[str, Any]]:
    return list(islice(cycle(MATH), n))
