r"""An upper bound on the size of the number that a LaTeX text denotes, found without computing the
number.

`2^{2^{40}}` has a terabit, and no verifier can work it out. The bound comes from the text alone: a
number has its own bits; a sum, product or fraction has the bits of its parts together; a power has
those of its base times the exponent. A letter has no bits, since sympy does not expand
`x^{1000000}`; but a power of a sum with a letter has many terms, each with a number. Commands that
are not understood (`\sin`, `\int`) count as a letter.
"""

import math
import re
from dataclasses import dataclass

MAX_BITS = 2**18
"""About 79,000 decimal digits; Python multiplies two such numbers in milliseconds."""
MAX_DEPTH = 20
"""Nested brackets. math-verify's parser takes seconds from about 15 on, and Python's stack ends at
about 50."""
_DIGIT = math.log2(10)
_LARGEST_LOG2 = 60.0  # limit for an exponent, or for the n of n!

_TOKEN = re.compile(
    r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+|\\(?:begin|end|text|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+"
    r"|\\.|\*\*|[^\s]"
)
_THOUSANDS = re.compile(
    r"\\[,!;: ]|\{,\}|(?<=\d),(?=\d{3}(?!\d))|\\left\b|\\right\b|\\displaystyle\b"
)
_OPENING = {
    "{": "}",
    "(": ")]",
    "[": ")]",
    r"\{": r"\}",
    r"\lfloor": r"\rfloor",
    r"\lceil": r"\rceil",
}
"""Opening brackets with the closing ones; an interval may be half open."""
_FRACTIONS = {r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"}
_BINOMIALS = {r"\binom", r"\dbinom", r"\tbinom"}
_WITH_LIMITS = {r"\sum", r"\prod", r"\int", r"\lim", r"\bigcup", r"\bigcap"}
_MATRICES = {r"\operatorname{eye}", r"\operatorname{zeros}", r"\operatorname{ones}"}
_TIMES = {"*", r"\cdot", r"\times"}
_OVER = {"/", ":", r"\div"}
_ENDS_A_TERM = {
    "+",
    "-",
    r"\pm",
    r"\mp",
    "=",
    ",",
    ";",
    "&",
    r"\\",
    "<",
    ">",
    "|",
    r"\mid",
    r"\cup",
    r"\cap",
    r"\bmod",
}


class TooLargeError(Exception):
    """A text denotes a number that is too large to compute; the message has the reason."""


@dataclass(slots=True)
class _Size:
    bits: float = 0.0  # of all its numbers, written exactly
    log2: float = 0.0  # upper bound of the logarithm of its value; 0 for a value below 1
    letter: bool = False  # a part of it is not a number
    terms: int = 1


def check_magnitude(text: str) -> None:
    """Raises TooLargeError for a formula of more than `MAX_BITS` bits, or with brackets deeper
    than `MAX_DEPTH`.

    It takes microseconds.
    """
    _Reader(_TOKEN.findall(_THOUSANDS.sub("", text))).sequence("", 0)


class _Reader:
    """Parser that reads tokens from left to right, each once."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.next = 0

    def peek(self) -> str:
        return self.tokens[self.next] if self.next < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.next += 1
        return token

    def sequence(self, closing: str, depth: int) -> _Size:
        """Reads terms, each made of factors, up to a token of `closing` or the end; checks their
        size."""
        if depth > MAX_DEPTH:
            raise TooLargeError(f"has more than {MAX_DEPTH} brackets or powers within one another")
        whole = _Size(terms=0)
        term = _Size()
        divides = False
        while (token := self.take()) and not (closing and token in closing):
            if token in _ENDS_A_TERM:
                whole = _sum(whole, term)
                term = _Size()
                divides = False
            elif token in _OVER:
                divides = True
            elif token not in _TIMES:
                factor = self.with_postfixes(self.atom(token, depth), depth, token in _WITH_LIMITS)
                term = _product(term, factor, divides)
                divides = False
        whole = _sum(whole, term)
        _bounded(whole.bits)
        return whole

    def atom(self, token: str, depth: int) -> _Size:
        """Reads the rest of the number, group or command that begins with `token`."""
        if token[0].isdecimal() or (token[0] == "." and token != "."):
            return _number(token)
        if token in _OPENING:
            return self.sequence(_OPENING[token], depth + 1)
        if token in _FRACTIONS:
            return _product(self.argument(depth), self.argument(depth), divides=True)
        if token in _BINOMIALS:
            return _binomial(self.argument(depth), self.argument(depth))
        if token == r"\sqrt":
            if self.peek() == "[":
                self.argument(depth)
            of = self.argument(depth)
            return _Size(of.bits, of.log2, letter=True)
        if token == r"\Gamma" and self.peek() == "(":
            return _factorial(self.argument(depth))
        if token in _MATRICES:
            _bounded(4 ** min(self.argument(depth).log2, _LARGEST_LOG2))
        return _Size(letter=True)

    def argument(self, depth: int) -> _Size:
        """Reads the argument of a command or `^`: a group or a token, with its sign."""
        negative = False
        while self.peek() in ("+", "-"):
            negative |= self.take() == "-"
        token = self.take()
        if not token:
            return _Size()
        if token in _OPENING:
            of = self.sequence(_OPENING[token], depth + 1)
        elif depth < MAX_DEPTH:
            of = self.atom(token, depth + 1)
        else:
            of = self.sequence("", depth + 1)
        return _Size(of.bits, 0.0, of.letter, of.terms) if negative else of

    def with_postfixes(self, of: _Size, depth: int, limits: bool) -> _Size:
        """Reads the factorials and powers after `of`; with `limits`, `_` and `^` mean the bounds of
        a sum."""
        while (token := self.peek()) in ("^", "**", "!", "_", "'"):
            self.take()
            if token == "!":
                of = _factorial(of)
            elif token == "_" or (limits and token == "^"):
                self.argument(depth)
            elif token != "'":
                of = _power(of, self.with_postfixes(self.argument(depth + 1), depth + 1, False))
        return of


def _bounded(bits: float) -> float:
    if bits > MAX_BITS:
        raise TooLargeError(f"would have more than {MAX_BITS} bits if it were worked out")
    return bits


def _number(token: str) -> _Size:
    mantissa, _, exponent = token.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    if not exponent:
        scale = 0.0
    elif len(exponent) < 20:
        scale = float(exponent)
    else:
        scale = math.inf
    log2 = math.log2(max(1, int(whole or 0))) if len(whole) < 20 else len(whole) * _DIGIT
    bits = _bounded(max(1.0, log2) + (2 * len(decimals) + abs(scale)) * _DIGIT)
    return _Size(bits, log2 + max(scale, 0.0) * _DIGIT)


def _sum(one: _Size, other: _Size) -> _Size:
    more = max(one.log2, other.log2) + (1.0 if one.terms and min(one.log2, other.log2) > 0 else 0.0)
    return _Size(one.bits + other.bits, more, one.letter or other.letter, one.terms + other.terms)


def _product(one: _Size, other: _Size, divides: bool) -> _Size:
    log2 = one.log2 + (0.0 if divides else other.log2)
    return _Size(
        one.bits + other.bits, log2, one.letter or other.letter, max(one.terms, other.terms)
    )


def _power(base: _Size, exponent: _Size) -> _Size:
    if exponent.letter:  # not worked out
        return _Size(base.bits + exponent.bits, base.log2, True, 1)
    times = 2 ** min(exponent.log2, _LARGEST_LOG2)
    bits = base.bits * times
    if base.letter and base.terms > 1:  # multiplied out, it has a number in each of its terms
        terms = math.prod((times + more) / more for more in range(1, min(base.terms, 8)))
        bits = (base.bits + math.log2(base.terms)) * times * terms
    _bounded(bits)
    return _Size(bits + exponent.bits, base.log2 * times, base.letter, base.terms)


def _factorial(of: _Size) -> _Size:
    if of.letter:
        return of
    n = 2 ** min(of.log2, _LARGEST_LOG2)
    bits = _bounded(n * math.log2(n + 1))
    return _Size(bits, bits)


def _binomial(n: _Size, k: _Size) -> _Size:
    if n.letter or k.letter:
        return _product(n, k, divides=False)
    bits = _bounded(
        min(2 ** min(n.log2, _LARGEST_LOG2), 2 ** min(k.log2, _LARGEST_LOG2) * max(n.log2, 1.0))
    )
    return _Size(bits + n.bits + k.bits, bits)
