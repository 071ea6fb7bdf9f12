r"""A coarse upper bound on the size of the number that a LaTeX text denotes, found without
computing the number.

`2^{2^{40}}` has a terabit. The limit on CPU time ends most such computations, but not those inside
C code (a gcd), and not before they have taken gigabytes.

A size is in bits. That of a product or a fraction is the sum of its parts' sizes, that of a sum
about its largest term's, that of a power its base's times the exponent. A letter or a command has
none, since sympy does not expand `x^{1000000}`.
"""

import math
import re

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


class TooLargeError(Exception):
    """A text denotes a number that is too large to compute; the message has the reason."""


def check_magnitude(text: str) -> None:
    """Raises TooLargeError for a formula of more than `MAX_BITS` bits, or with brackets deeper
    than `MAX_DEPTH`."""
    text = _POWER_AND_SIGN.sub("^", _IGNORED.sub("", text))
    text = _MATRIX.sub("⟨64⟩^", _FLOOR_OR_CEILING.sub(" ", text))
    for _ in range(MAX_DEPTH + 1):
        text, groups = _INNERMOST_GROUP.subn(lambda group: f"⟨{_size(group[1])}⟩", text)
        if not groups:
            _size(text)
            return
    raise TooLargeError(f"has more than {MAX_DEPTH} brackets within one another")


def _size(flat: str) -> int:
    """Returns the size of a text in which each group is replaced by its size, `⟨size⟩`."""
    terms = [_size_of_term(term) for term in _END_OF_TERM.split(flat) if term.strip()]
    size = max(terms, default=0.0) + math.log2(max(1, len(terms)))
    if size > MAX_BITS:
        raise TooLargeError(f"would have more than {MAX_BITS} bits if it were worked out")
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
