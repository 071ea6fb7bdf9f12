"""Mathematics: two expressions are equal if math-verify (sympy) can show it, however they are
written."""

import logging
import math
import re
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from lrl.errors import above
from lrl.rewards.base import GaveUp, Reward, reference_of
from lrl.rewards.verifiers import expression
from lrl.rewards.verifiers.final_answer import final_answers, marked_answers

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
_DECIMALS = 6  # that math-verify compares; leading zeros do not count
_MAX_DECIMALS = 60


class Math(Reward):
    r"""1 if the final answer of the response equals the right one by math-verify, else 0; also for
    one that cannot be worked out (`2^{2^{40}}`) or takes too long.

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
        r"""Returns 1.0, 0.0 or `GaveUp`. The column `answer` has the right expression in LaTeX,
        else the last `\boxed{}` of the column `solution`."""
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
        """Returns whether one of the expressions equals `right`."""
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
    """Raises ValueError for a row without a right answer that can be read."""
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


# ---- the two limits at which it gives up: the size of a number, seen from its text, and CPU time
#
# `2^{2^{40}}` has a terabit. The limit on CPU time does not end what runs inside C code (a gcd),
# nor anything before it has taken gigabytes. So a coarse upper bound comes first.
#
# A size is in bits: of a product or a fraction the sum of its parts' sizes, of a sum about its
# largest term's, of a power its base's times the exponent, of a letter or a command 0, since sympy
# does not expand `x^{1000000}`.

MAX_BITS = 2**18  # 79,000 decimal digits; Python multiplies two such numbers in milliseconds
MAX_DEPTH = 20  # of brackets; math-verify's parser takes seconds from about 15 on
_LARGEST_LOG2 = 60.0
_BITS_OF_DECIMALS = 7.0
_BITS_OF_DIGIT = math.log2(10)

_IGNORED = re.compile(
    r"\\(?:begin|end|text|mathrm|mbox)\s*\{[^{}]*\}|\\[,!;: ]|\{,\}|(?<=\d),(?=\d{3}(?!\d))"
    r"|\\(?:left|right|displaystyle)\b"
)
_POWER_AND_SIGN = re.compile(r"(?:\^|\*\*)[\s+-]*")
_MATRIX = re.compile(r"\\operatorname\s*\{(?:eye|zeros|ones)\}")
_FLOOR_OR_CEILING = re.compile(r"\\[lr](?:floor|ceil)\b")
_INNERMOST_GROUP = re.compile(r"[({\[]([^(){}\[\]]*)[)}\]]")
_END_OF_TERM = re.compile(r"[-+=,;&<>|]|\\(?:pm|mp|mid|cup|cap|bmod)\b|\\\\")
_TOKEN = re.compile(r"⟨\d+⟩|\d+(?:\.\d*)?|\.\d+|\\[a-zA-Z]+|\S")


class TooMuchError(BaseException):
    """Too much to work out. No `Exception`: a library might catch that as one of its own."""


def check_magnitude(text: str) -> None:
    """Raises TooMuchError for a formula beyond `MAX_BITS` or `MAX_DEPTH`."""
    text = _POWER_AND_SIGN.sub("^", _IGNORED.sub("", text))
    text = _MATRIX.sub("⟨64⟩^", _FLOOR_OR_CEILING.sub(" ", text))
    for _ in range(MAX_DEPTH + 1):
        text, groups = _INNERMOST_GROUP.subn(lambda group: f"⟨{_size(group[1])}⟩", text)
        if not groups:
            _size(text)
            return
    raise TooMuchError(f"has more than {MAX_DEPTH} brackets within one another")


def _size(flat: str) -> int:
    """Returns the size of a text in which each group is replaced by its size, `⟨size⟩`."""
    terms = [_size_of_term(term) for term in _END_OF_TERM.split(flat) if term.strip()]
    size = max(terms, default=0.0) + math.log2(max(1, len(terms)))
    if size > MAX_BITS:
        raise TooMuchError(f"would have more than {MAX_BITS} bits if it were worked out")
    return math.ceil(size)


def _size_of_term(term: str) -> float:
    factors: list[float] = []  # from right to left: what an operator applies to is read already
    exponents = 1.0
    factorials = 0
    for token in reversed(_TOKEN.findall(term)):
        if token == "!":
            factorials += 1
        elif token == "^" and factors:
            exponents = _value(factors.pop())
        elif token == "_" and factors:
            factors.pop()
        elif token == r"\Gamma" and factors:
            factors.append(_factorial(factors.pop()))
        elif token in (r"\binom", r"\dbinom", r"\tbinom") and len(factors) > 1:
            factors.append(factors.pop() * _value(factors.pop()))  # at most n^k
        else:
            size = _size_of_number(token)
            for _ in range(factorials):
                size = _factorial(size)
            factors.append(size * exponents)
            exponents = 1.0
            factorials = 0
    return sum(factors)


def _size_of_number(token: str) -> float:
    if token[0] == "⟨":
        return float(token[1:-1])
    whole, point, _ = token.partition(".")
    if not (whole or "0").isdecimal():
        return 0.0
    log2 = math.log2(max(2, int(whole or 0))) if len(whole) < 20 else len(whole) * _BITS_OF_DIGIT
    return log2 + (_BITS_OF_DECIMALS if point else 0.0)


def _value(size: float) -> float:
    return float(2 ** min(size, _LARGEST_LOG2))


def _factorial(size: float) -> float:
    return _value(size) * size


_REPEAT_S = 0.5  # until the signal comes again: the code may have swallowed its exception
_Found = TypeVar("_Found")


def within(seconds: float, work: Callable[[], _Found]) -> _Found:
    """Returns the result of `work`; raises TooMuchError after `seconds` of this process's CPU time,
    also if `work` has swallowed it and returned.

    A signal ends the work: between two bytecode instructions and inside a multiplication of large
    numbers, but not inside other C code, and only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    out_of_time = TooMuchError(f"takes more than {seconds:g} s of CPU time")
    armed, late = True, False

    def ring(*_: object) -> None:
        nonlocal late
        if armed:
            late = True
            raise out_of_time

    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _REPEAT_S)
            found = work()
        finally:
            armed = False
    finally:  # the signal may come just before the line above, and its next one comes much later
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        # Never the default, which would end the process if a signal is still pending.
        signal.signal(signal.SIGVTALRM, before if callable(before) else signal.SIG_IGN)
    if late:
        raise out_of_time
    return found
