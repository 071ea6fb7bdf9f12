"""The quickstart's task: sums of two two-digit numbers, worked out digit by digit.

A response is either worked out (`7+8=15,4+3+1=8>85`) or direct (`>85`); only the text after the
last `>` counts. The task is so small that a policy of a million parameters learns it in minutes on
two cores. There are two kinds of response, so that the policy has a choice to learn: working costs
tokens and earns nothing by itself, but it is right.

There are 8,100 problems. They are split once, independently of any run's seed, into `problems` to
train on (warm-up and reinforcement learning), `tuning` to choose settings with, and `held_out` to
report on.
"""

import random
from functools import cache

SPLIT_SEED = 2505
TEST_ROWS = 500


def problems() -> list[dict[str, str]]:
    """Returns the 7,100 training rows, `{"prompt": "47+38=", "answer": "85"}`, shuffled."""
    return _rows()[2 * TEST_ROWS :]


def tuning() -> list[dict[str, str]]:
    """Returns 500 rows to choose settings with; never trained on, never reported."""
    return _rows()[TEST_ROWS : 2 * TEST_ROWS]


def held_out() -> list[dict[str, str]]:
    """Returns 500 rows to report on; never trained on, never used to choose a setting."""
    return _rows()[:TEST_ROWS]


def worked(prompt: str) -> str:
    """Returns the working of a problem, units first: `47+38=` gives `7+8=15,4+3+1=8`."""
    left, right = prompt.removesuffix("=").split("+")
    columns, carry = [], 0
    for a, b in zip(reversed(left), reversed(right), strict=True):
        total = int(a) + int(b) + carry
        columns.append(f"{a}+{b}{'+1' if carry else ''}={total}")
        carry = total // 10
    return ",".join(columns)


def correct(
    prompt: str, response: str, *, answer: str, finish_reason: str, **columns: object
) -> bool:
    """Returns whether the response is not cut and the text after its last `>` is the sum.

    Args:
        prompt: The problem, such as `47+38=`.
        response: The decoded response, without special tokens.
        answer: The sum in decimal digits.
        finish_reason: `stop` or `length`; a response cut at the token limit earns nothing.
        columns: The row's other columns; not used.
    """
    _, mark, result = response.rpartition(">")
    return finish_reason == "stop" and bool(mark) and result == answer


@cache
def _rows() -> list[dict[str, str]]:
    numbers = range(10, 100)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    random.Random(SPLIT_SEED).shuffle(rows)
    return rows
