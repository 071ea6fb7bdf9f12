r"""Numbers in text, in plain notation or LaTeX, each with its exact value.

A number is a decimal, a fraction (`3/4`, `\frac{3}{4}`), a mixed number (`1\frac{1}{2}`, `1 1/2`),
or a decimal in scientific notation (`5 \times 10^2`, `5e2`). The exponent or index of a letter
(`m^2`, `x_1`) is none.
"""

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import islice

_NOISE = {r"\$": "", "$": "", "{,}": ",", r"\,": "", r"\!": ""}
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree\b")
TEXT = r"\\(?:text(?:bf|it|rm|sf|tt|sc|sl|up|md|normal)?|math(?:rm|bf|it|sf|tt)|[mh]box)\s*\{"
"""The beginning of a group of text."""
TEXT_GROUP = re.compile(TEXT + r"([^{}]*)\}")
_EXPONENT_OF_LETTERS = re.compile(
    rf"({TEXT}[^{{}}\d]*\}}|(?<![a-zA-Z\\])[a-zA-Z]+)"
    r"\s*[\^_]\s*(?:\{[^{}]*\}|-?\d+)"
)
_DIGIT_OF_A_UNIT = re.compile(r"(?<=[a-zA-Z])\d(?!\d)")
# Thousands separated by spaces; only in a box, since elsewhere two numbers may follow one another.
SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:\s\d{3})+(?!\d)")
_NOT_ONE_NUMBER = re.compile(
    r"\\(?:[dtc]?frac|sqrt|pi|sum|prod|int|log|ln|sin|cos|tan|neq?|[lg](?:eq?|t))(?![a-zA-Z])"
    r"|[!^<>]|\b(?:not|half|dozen|hundred|thousand|million|billion|trillion)s?\b"
)
"""The text that turns a number next to it into another number."""

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)"
# The look-ahead changes no result and makes a search nine times faster. A minus right after a word
# or a bracket is a subtraction ("20-10"), not a sign.
_NUMBER = re.compile(
    rf"""(?=[-.\d\\])(?<!\d)
    (?P<sign>(?:(?<![\w)}}\]])-)?)
    (?:
        (?P<whole>\d+)?\s*\\[dtc]?frac\s*
            (?:\{{\s*(?P<above>-?{_DECIMAL})\s*\}}|(?P<above_digit>\d))\s*
            (?:\{{\s*(?P<below>-?{_DECIMAL})\s*\}}|(?P<below_digit>\d))
        |
        (?:(?P<units>\d+)\s+)?(?<!/)(?P<left>{_DECIMAL})\s*/\s*(?P<right>{_DECIMAL})(?!\s*/)
        |
        (?:(?P<mantissa>{_DECIMAL})\s*(?:\\times|\\cdot|[*x])\s*)?(?<![\d.])
            10\s*\^\s*(?:\{{\s*(?P<power>[-+]?\d{{1,3}})\s*\}}|(?P<bare_power>[-+]?\d{{1,3}})(?!\d))
        |
        (?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?\d{{1,3}})(?!\w))?
    )""",
    re.VERBOSE,
)


_UNEQUAL = re.compile(rf"(?:\\neq?(?![a-zA-Z])|!=)\s*[-+]?{_DECIMAL}")
_NUMERATORS = ("above", "above_digit", "left", "mantissa", "decimal")
_DENOMINATORS = ("below", "below_digit", "right")
_POWERS_OF_TEN = ("power", "bare_power", "exponent")
_WHOLES = ("whole", "units")
_MOST_CHARACTERS = 1000
"""Of a number whose value is worked out: that takes long, and no reference is that long."""


class Number:
    """A number in a text; `text` is its spelling there, without `$` and thin spaces."""

    def __init__(self, match: re.Match[str]) -> None:
        self.text = match[0]
        self._match = match

    @property
    def value(self) -> Fraction | None:
        """The exact value; None for a division by zero, or if it is too long."""
        if len(self.text) > _MOST_CHARACTERS:
            return None
        numerator = self._first(_NUMERATORS, default="1")
        denominator = self._first(_DENOMINATORS, default="1")
        if denominator == 0:
            return None
        power_of_ten = self._first(_POWERS_OF_TEN, default="0")
        whole = self._first(_WHOLES, default="0")
        value = whole + numerator / denominator * Fraction(10) ** int(power_of_ten)
        return -value if self._match["sign"] else value

    @property
    def rest(self) -> str:
        """The text that follows it."""
        return self._match.string[self._match.end() :]

    def _first(self, names: Sequence[str], default: str) -> Fraction:
        written = next((self._match[name] for name in names if self._match[name]), default)
        return Fraction(Decimal(written.replace(",", "")))


def numbers_in(text: str) -> list[Number]:
    r"""Returns the numbers of a text, in order, but for those after `\ne`."""
    text = _UNEQUAL.sub("", _prepared(text))
    return [Number(match) for match in _NUMBER.finditer(text)]


def one_number(text: str, *, spaced: bool = False) -> Fraction | None:
    r"""Returns the value of the number that a text consists of, besides units and `\text{}`.

    None if it has no number or several ones, or a number that is part of a larger expression. With
    `spaced`, spaces may separate thousands.
    """
    text = re.sub(r"^\s*-\s+", "-", _prepared(text))
    if spaced:
        text = SPACED_THOUSANDS.sub(lambda number: "".join(number[0].split()), text)
    outside = TEXT_GROUP.sub(" ", text)
    for part in (text, outside, _DIGIT_OF_A_UNIT.sub("", outside)):
        found = list(islice(_NUMBER.finditer(part), 2))
        if len(found) == 1:
            (match,) = found
            rest = part[: match.start()] + " " + part[match.end() :]
            return None if _NOT_ONE_NUMBER.search(rest) else Number(match).value
    return None


def _prepared(text: str) -> str:
    text = as_latex(text)
    for written, meant in _NOISE.items():
        text = text.replace(written, meant)
    return _EXPONENT_OF_LETTERS.sub(r"\1", _DEGREES.sub("", text))


# ---- mathematics in Unicode: a policy writes `½`, `x²`, `√2`, `∞` or `90°`

_COMMANDS = re.findall(
    r"(\S) (\w+)",
    """
    ∞ infty  × times  · cdot  ⋅ cdot  ∙ cdot  ÷ div  ± pm  ∓ mp  ≤ le  ≦ le  ⩽ le  ≥ ge  ≧ ge  ⩾ ge
    ≠ ne  ≈ approx  ≡ equiv  ∪ cup  ∩ cap  ∈ in  ∉ notin  ⊂ subset  ⊆ subseteq  ∅ emptyset
    ∖ setminus  ⌊ lfloor  ⌋ rfloor  ⌈ lceil  ⌉ rceil  ⟨ langle  ⟩ rangle  ∑ sum  ∏ prod  ∫ int
    ∠ angle  → to  α alpha  β beta  γ gamma  δ delta  ε epsilon  ζ zeta  η eta  θ theta  κ kappa
    λ lambda  μ mu  ν nu  ξ xi  π pi  ρ rho  σ sigma  τ tau  φ phi  χ chi  ψ psi  ω omega  Γ Gamma
    Δ Delta  Θ Theta  Λ Lambda  Π Pi  Σ Sigma  Φ Phi  Ψ Psi  Ω Omega
    """,
)
_CHARACTERS = str.maketrans(
    {sign: rf"\{name} " for sign, name in _COMMANDS}
    | {"°": r"^{\circ}", "∣": "|"}
    | dict.fromkeys("−–‐", "-")
    | dict.fromkeys("⁄∕", "/")
    | dict.fromkeys("′’", "'")
)
_CHARACTERS_THAT_NFKC_CHANGES = str.maketrans(
    {letter: rf"\mathbb{{{plain}}}" for letter, plain in zip("ℝℤℚℕℂ", "RZQNC", strict=True)}
    | {"º": "°"}
)
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣʸᵏᵐ]+")
_SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙₓ]+")
_FRACTIONS = re.compile("[¼-¾⅐-⅞↉]")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(-?\d+(?:\.\d+)?|[^\W\d_]))")
"""A root, with its number, letter or bracket."""


def as_latex(text: str) -> str:
    """Returns `text` with LaTeX for mathematics in Unicode, and without currency signs but `$`."""
    if text.isascii():
        return text
    text = text.translate(_CHARACTERS_THAT_NFKC_CHANGES)
    text = _SUPERSCRIPTS.sub(lambda run: f"^{{{_plain(run[0])}}}", text)
    text = _SUBSCRIPTS.sub(lambda run: f"_{{{_plain(run[0])}}}", text)
    text = _FRACTIONS.sub(lambda one: r"\frac{{{}}}{{{}}}".format(*_plain(one[0]).split("⁄")), text)
    text = _ROOT.sub(_root_as_latex, _plain(text)).translate(_CHARACTERS)
    return "".join(sign for sign in text if sign == "$" or unicodedata.category(sign) != "Sc")


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _root_as_latex(root: re.Match[str]) -> str:
    radicand = root[2] or root[3] or root[4] or ""
    return f"{_ROOTS[root[1]]}{{{radicand}}}"
