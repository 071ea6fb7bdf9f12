"""Grade-school arithmetic: the answer is one number, and only the number counts."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from lrl.rewards.base import Reward, reference_of
from lrl.rewards.verifiers.expression import numbers_in, one_number, value_of
from lrl.rewards.verifiers.final_answer import is_withdrawn, marked_answers, without_denied

_BEFORE_THE_NUMBER = re.compile(
    r"####[\s*_(\\]*(?:(?:the\s+)?(?:final\s+)?answer[\s*_]*(?:is\b)?[\s:*_(\\]*)?"
    r"(?=-?(?:\\?\$)?(?:\.?\d|\\[dtc]?frac))",
    re.IGNORECASE,
)


class GSM8K(Reward):
    r"""1 if the final number of the response is the right one, else 0. Data set: Cobbe et al.,
    2110.14168.

    Notation does not matter: thousands separators, currency and percent signs, units, trailing
    zeros, fractions (`\frac{3}{2}` for 1.5), powers of ten (`5 \times 10^2`). A number in a box
    must be the only one.
    """

    name = "gsm8k"
    binary = True

    def check_row(self, columns: Mapping[str, Any]) -> None:
        _reference_number(columns)

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns 1.0 or 0.0. The column `answer` is in the form of GSM8K (`... #### 72`), or has
        one number."""
        return float(final_number(response) == _reference_number(columns))


def final_number(text: str) -> Fraction | None:
    """Returns the number in the last box or answer tag (the only one there, after its last `=`), else
    after the last `####`, else the last one; None if there is none."""
    text, written = without_denied(text), text
    if marked := marked_answers(text):
        return one_number(marked[0].rpartition("=")[2], spaced=True)
    *_, hashes = [None, *_BEFORE_THE_NUMBER.finditer(text)]
    if hashes is not None and (numbers := numbers_in(text[hashes.end() :])):
        return value_of(numbers[0])
    numbers = numbers_in(text)
    is_stated = numbers and not is_withdrawn(numbers[-1][0], written)
    return value_of(numbers[-1]) if is_stated else None


def _reference_number(columns: Mapping[str, Any]) -> Fraction:
    answer = reference_of(columns, "answer")
    if "####" in answer:
        number = one_number(answer.rpartition("####")[2])
    else:
        number = one_number([*marked_answers(answer), answer][0])
    if number is None or isinstance(columns["answer"], bool):
        raise ValueError(
            f"the column `answer` is {columns['answer']!r:.200}; GSM8K compares numbers, so it "
            "must have exactly one, after `####` if there is more text"
        )
    return number
