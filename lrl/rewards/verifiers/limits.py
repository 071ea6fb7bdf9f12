r"""The two limits at which `Math` gives up: the size of a number, seen from its text, and CPU time.

`2^{2^{40}}` has a terabit. The limit on CPU time ends most such computations, but not those inside
C code (a gcd), and not before they have taken gigabytes. So a coarse upper bound comes first.

A size is in bits. That of a product or a fraction is the sum of its parts' sizes, that of a sum
about its largest term's, that of a power its base's times the exponent. A letter or a command has
none, since sympy does not expand `x^{1000000}`.
"""

import math
import re
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

MAX_BITS = 2**18
"""About 79,000 decimal digits; Python multiplies two such numbers in milliseconds."""
MAX_DEPTH = 20
"""Nested brackets. math-verify's parser takes seconds from about 15 on."""
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
    """What cannot be worked out; the message says why. Not an `Exception`: a library might catch
    that as one of its own."""


def check_magnitude(text: str) -> None:
    """Raises TooMuchError for a formula of more than `MAX_BITS` bits, or with brackets deeper
    than `MAX_DEPTH`."""
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


_REPEAT_S = 0.5
"""Seconds after which the signal comes again, in case the code has swallowed its exception."""
_Found = TypeVar("_Found")


def within(seconds: float, work: Callable[[], _Found]) -> _Found:
    """Runs `work` within `seconds` of this process's CPU time, and returns its result.

    A signal ends the work. Python handles it between two bytecode instructions and inside a
    multiplication of large numbers, but not inside other C code. Python handles no signals outside
    of the main thread, so there is no limit there.

    Raises TooMuchError, also if `work` has swallowed it and returned.
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
