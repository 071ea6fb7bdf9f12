"""Mathematics: two expressions are equal if math-verify (sympy) can show it, however they are written.

It cannot for all that a policy may write, and then the answer is wrong: the verifier gives up. Numbers that nobody can
work out are seen from the text; what else takes too long is ended after `give_up_s`. math-verify's own limit is
switched off: it counts the time that goes by, and so calls a right answer wrong on a busy machine.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import Any

from math_verify import parse, verify

from lrl.rewards.base import GaveUp, Reward
from lrl.rewards.boxed import last_boxed
from lrl.rewards.cpu_limit import OutOfTimeError, within
from lrl.rewards.size import TooLargeError, check_size
from lrl.runtime.config_errors import above

# Each warns once per process that its timeout is off and that one must provide one's own.
for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).setLevel(logging.ERROR)

_PLAIN_PI = re.compile(r"(?<![a-zA-Z\\])(?<!text\{)(?<!mathrm\{)(?<!mbox\{)(?<!name\{)pi(?![a-zA-Z])")
_LAST_FORMULA = re.compile(r"(?:\$([^$]+)\$|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\])[\s.*]*$", re.DOTALL)
_EQUALS = re.compile(r"(?<![\\<>!])=")
_LONGEST_END = 2000
"""Characters at an answer's end in which a formula that is not boxed is looked for."""


class Math(Reward):
    r"""1 if the answer's final expression equals the right one, else 0. Checked by math-verify.

    It gives up on an answer, which is then wrong, if that could not be worked out (`2^{2^{40}}`) or takes too long.

    Args:
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
        give_up_s: Seconds of computing after which an answer is given up; at most half of `data.reward_timeout_s`.
    """

    def __init__(self, weight: float = 1.0, name: str = "math", give_up_s: float = 2.0) -> None:
        super().__init__(weight, name)
        above(0, "Math", give_up_s=give_up_s)
        self.give_up_s = give_up_s

    def missing_column(self, columns: Collection[str]) -> str:
        """See `Reward.missing_column`."""
        return "" if {"answer", "solution"} & set(columns) else "'answer' or 'solution'"

    def __call__(
        self, prompt: str, response: str, *, answer: object = None, solution: str | None = None, **columns: Any
    ) -> float:
        r"""1.0, 0.0 or `GaveUp`. `answer` is the gold expression in LaTeX; without it, the `\boxed{}` of `solution` is.

        Raises:
            ValueError: If the row has neither column, or no expression can be read from it.
        """
        text = solution if answer is None else rf"\boxed{{{answer}}}"
        if text is None or r"\boxed" not in text:
            raise ValueError(r"the row has neither a column `answer` nor a `solution` with a \boxed{}")
        right, final = _final(text), _final(response)
        same = right.split() == final.split()
        try:
            check_size(right)
        except TooLargeError as error:
            if same:
                return 1.0
            raise ValueError(f"the gold answer {right!r} {error}: nothing can be compared with it") from error
        try:
            check_size(final if same or _EQUALS.search(right) else _EQUALS.split(final)[-1])
        except TooLargeError as error:
            return GaveUp(f"the answer {error}")
        gold = self._gold(text)
        try:
            return within(self.give_up_s, lambda: float(verify(gold, _parsed(response), timeout_seconds=None)))
        except OutOfTimeError:
            return GaveUp(f"the answer was not compared after {self.give_up_s:g} s of computing")

    def _gold(self, text: str) -> list[Any]:
        try:
            gold = within(self.give_up_s, lambda: _parsed(text))
        except OutOfTimeError as error:
            raise ValueError(
                f"the gold answer {text!r} was not read after {self.give_up_s:g} s of computing"
            ) from error
        if not gold:
            raise ValueError(f"no expression can be read from the gold answer {text!r}")
        return gold


def _parsed(text: str) -> list[Any]:
    return parse(_PLAIN_PI.sub(r"\\pi", text), parsing_timeout=None)


def _final(text: str) -> str:
    r"""What math-verify will look at first: the last box, though it may not be closed, else a formula at the end."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if r"\boxed{" in text:
        return text.rpartition(r"\boxed{")[2]
    formula = _LAST_FORMULA.search(text[-_LONGEST_END:])
    return next(group for group in formula.groups() if group) if formula else ""
