"""Mathematics: two expressions are equal if math-verify (sympy) can show it, however they are written.

math-verify limits its own time with SIGALRM, which works in main threads only and which a long step inside C code
ignores. It is switched off here: the reward pool's deadline holds for every reward, and kills.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from math_verify import parse, verify

from lrl.rewards.base import Reward

# Each warns once per process that its timeout is off and that one must provide one's own. The pool does.
for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).setLevel(logging.ERROR)


class Math(Reward):
    r"""1 if the answer's final expression equals the right one, else 0. Checked by math-verify.

    Args:
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
    """

    def __init__(self, weight: float = 1.0, name: str = "math") -> None:
        super().__init__(weight, name)

    def lacks(self, columns: Collection[str]) -> str:
        """See `Reward.lacks`."""
        return "" if {"answer", "solution"} & set(columns) else "'answer' or 'solution'"

    def __call__(
        self, prompt: str, response: str, *, answer: object = None, solution: str | None = None, **columns: Any
    ) -> float:
        r"""1.0 or 0.0. `answer` is the gold expression in LaTeX; without it, the `\boxed{}` of `solution` is.

        Raises:
            ValueError: If the row has neither column, or no expression can be read from it.
        """
        text = solution if answer is None else rf"\boxed{{{answer}}}"
        if text is None or r"\boxed" not in text:
            raise ValueError(r"the row has neither a column `answer` nor a `solution` with a \boxed{}")
        gold = _parsed(text)
        if not gold:
            raise ValueError(f"no expression can be read from the gold answer {text!r}")
        return float(verify(gold, _parsed(response), timeout_seconds=None))


def _parsed(text: str) -> list[Any]:
    return parse(text, parsing_timeout=None)
