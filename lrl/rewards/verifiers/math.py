"""Mathematics: two expressions are equal if math-verify (sympy) can show it, however they are
written."""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from lrl.errors import above
from lrl.rewards.base import GaveUp, Reward, reference_of
from lrl.rewards.verifiers import expression
from lrl.rewards.verifiers.final_answer import final_answers, marked_answers
from lrl.rewards.verifiers.limits import TooMuchError, check_magnitude, within

# Each warns once per process that its timeout is off. That counts wall-clock time, so that a right
# response would be wrong on a busy machine.
for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).setLevel(logging.ERROR)

# Without units: see `expression_text`. Without plain numbers: of a text that is no formula, the
# parser would take one.
_LATEX = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        basic_latex=True,
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="last",
        equations=False,
    )
)
_EQUALS = re.compile(r"(?<![\\<>!])=")
_DECIMALS = 6
"""Places after the point that math-verify compares; leading zeros do not count."""
_MAX_DECIMALS = 60


class Math(Reward):
    r"""1 if the final answer of the response equals the right one, else 0. Checked by math-verify.

    It gives up on a response that cannot be worked out (`2^{2^{40}}`) or takes too long; the
    response is then wrong.

    Args:
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
        give_up_s: Seconds of CPU time before it gives up on a response.
    """

    binary = True

    def __init__(self, weight: float = 1.0, name: str = "math", give_up_s: float = 2.0) -> None:
        super().__init__(weight, name)
        above(0, "Math", give_up_s=give_up_s)
        self.give_up_s = give_up_s

    def check_row(self, columns: Mapping[str, Any]) -> None:
        _reference(columns)

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        r"""Returns 1.0, 0.0 or `GaveUp`.

        The column `answer` has the right expression in LaTeX. If there is none, the last `\boxed{}`
        of the column `solution` has it.
        """
        reference = _reference(columns)
        finals = final_answers(response)
        words = expression.words_of(reference)
        if words is not None and any(_has_words(final, words) for final in finals):
            return 1.0
        if words is not None:  # a symbol may mean the word (`\infty`), and a product of letters not
            finals = [final for final in finals if not expression.has_letters(final)]
        return self._compare(
            expression.cleaned(reference), [expression.cleaned(final) for final in finals]
        )

    def _compare(self, right: str, finals: list[str]) -> float:
        """Returns the verdict on expressions of which one must equal `right`."""
        right, finals = expression.comparable(right, finals)
        if any(right.split() == final.split() for final in finals):
            return 1.0
        try:
            check_magnitude(right)
            gold = within(self.give_up_s, lambda: _parsed(right))
        except TooMuchError as error:
            raise ValueError(f"the gold answer {right!r} {error}") from error
        if not gold:
            raise ValueError(f"no expression can be read from the gold answer {right!r}")
        try:
            for final in finals:
                check_magnitude(final if _EQUALS.search(right) else _EQUALS.split(final)[-1])
            return within(
                self.give_up_s,
                lambda: float(any(_are_equal(gold, _parsed(final)) for final in finals)),
            )
        except TooMuchError as error:
            return GaveUp(f"the response {error}")


def _reference(columns: Mapping[str, Any]) -> str:
    """Returns the right answer of a row; raises ValueError if it has none that can be read."""
    found = ""
    if columns.get("answer") is not None:
        answer = reference_of(columns, "answer")
        found = [answer.rpartition("####")[2], *marked_answers(answer)][-1]
    elif "solution" in columns:
        found = ["", *marked_answers(reference_of(columns, "solution"))][-1]
    if not found.strip():
        raise ValueError(r"the row has neither a column `answer` nor a `solution` with a \boxed{}")
    if expression.words_of(found) is None and not expression.is_readable(expression.cleaned(found)):
        raise ValueError(f"the gold answer {found!r} has numbers without an operator between them")
    return found


def _has_words(final: str, words: frozenset[str]) -> bool:
    choice = expression.choice_of(final)
    return expression.words_of(_EQUALS.split(final)[-1], fewest_letters=1) == words or (
        choice is not None and words == {choice}
    )


def _parsed(text: str) -> list[Any]:
    """Returns math-verify's reading of an expression, or else of its right side; and the text."""
    for part in (text, _EQUALS.split(text)[-1]):
        boxed = rf"\boxed{{{part}}}"
        found = parse(boxed, [_LATEX], extraction_mode="first_match", parsing_timeout=None)
        if found and not isinstance(found[0], str):
            break
    return found


def _are_equal(gold: list[Any], final: list[Any]) -> bool:
    return verify(
        gold,
        final,
        float_rounding=_decimals(gold[0]),
        allow_set_relation_comp=True,  # $1 \le x < 2$ for $[1,2)$
        timeout_seconds=None,
    )


def _decimals(gold: Any) -> int:
    """Returns the decimal places that must agree with `gold`: 0.00005 is not 0.0000504."""
    if not getattr(gold, "is_number", False) or not gold.is_real or gold.is_zero:
        return _DECIMALS
    size = abs(float(gold))
    zeros = -math.floor(math.log10(size)) - 1 if 0 < size < 1 else 0
    return min(_DECIMALS + zeros, _MAX_DECIMALS)
