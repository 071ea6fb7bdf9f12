r"""Numbers with their exact values, and expressions made ready for math-verify's parser.

The parser adds numbers side by side (`5 7` and `5(7)` are 12), ignores the base of a number (`52_8`
is 52), takes single letters for units (3 of `3t`) and reads `east` as the product e·a·s·t, as
`seat`.
"""

import re
import unicodedata
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
_MOST_CHARACTERS = 1000  # of a number whose value is worked out


def numbers_in(text: str) -> list[re.Match[str]]:
    r"""Returns the numbers of a text, in order, but for those after `\ne`: decimals, fractions,
    mixed numbers, and decimals in scientific notation."""
    return list(_NUMBER.finditer(_UNEQUAL.sub("", _prepared(text))))


def value_of(number: re.Match[str]) -> Fraction | None:
    """Returns the exact value; None for a division by zero, or if it is too long."""

    def first(default: str, names: str) -> Fraction:
        written = next((number[name] for name in names.split() if number[name]), default)
        return Fraction(Decimal(written.replace(",", "")))

    if len(number[0]) > _MOST_CHARACTERS:
        return None
    numerator = first("1", "above above_digit left mantissa decimal")
    denominator = first("1", "below below_digit right")
    if denominator == 0:
        return None
    power_of_ten = Fraction(10) ** int(first("0", "power bare_power exponent"))
    value = first("0", "whole units") + numerator / denominator * power_of_ten
    return -value if number["sign"] else value


def one_number(text: str, *, spaced: bool = False) -> Fraction | None:
    r"""Returns the value of the only number of a text, besides units and `\text{}`; None if it is
    part of a larger expression. With `spaced`, spaces may separate thousands."""
    text = re.sub(r"^\s*-\s+", "-", _prepared(text))
    if spaced:
        text = SPACED_THOUSANDS.sub(lambda number: "".join(number[0].split()), text)
    outside = TEXT_GROUP.sub(" ", text)
    for part in (text, outside, _DIGIT_OF_A_UNIT.sub("", outside)):
        found = list(islice(_NUMBER.finditer(part), 2))
        if len(found) == 1:
            (match,) = found
            rest = part[: match.start()] + " " + part[match.end() :]
            return None if _NOT_ONE_NUMBER.search(rest) else value_of(match)
    return None


def _prepared(text: str) -> str:
    text = as_latex(text)
    for written, meant in _NOISE.items():
        text = text.replace(written, meant)
    return _EXPONENT_OF_LETTERS.sub(r"\1", _DEGREES.sub("", text))


# ---- expressions

_PLAIN_PI = re.compile(
    r"(?<![a-zA-Z\\])(?<!text\{)(?<!mathrm\{)(?<!mbox\{)(?<!name\{)pi(?![a-zA-Z])"
)
_REPLACED = [
    (re.compile(pattern), meant)
    for pattern, meant in {
        r"(?<!\\)\\[()\[\]]|\$": " ",  # marks of a formula
        r"(?<!\\)\\!\s*|\\displaystyle\b|\\(?:large|Large|bf|rm|it)\b": "",
        r"(?<!\\)\\(?:[,;: ]|q?quad\b)|~": " ",
        r"\\(?:boldsymbol|bm|underline|textcolor\s*\{[^{}]*\}|color\s*\{[^{}]*\})(?![a-zA-Z])": "",
        r"\\varnothing\b": r"\\emptyset",
        r"\{\s*,\s*\}": ",",
        r"\\[dtc]?frac\s*(\d)\s*(\d)": r"\\frac{\1}{\2}",
        r"\*\*\s*(-?\d+)": r"^{\1}",
        r"\*\*": "^",
        r"(?<![\d.,/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])": r"\1\\frac{\2}{\3}",
        r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]\+?(-?\d+)(?![\w.])": r"\1 \\times 10^{\2}",
        # what the parser would add: 5(7), (5)(7), (5)7
        r"(?<![_^\d.])(\d[\d.]*)\s*(?=(?:\\left\s*)?\()": r"\1 \\cdot ",
        r"\)\s*(?=(?:\\left\s*)?\(|\d)": r") \\cdot ",
    }.items()
]
_LEFT_OF_A_RIGHT_SIDE = re.compile(r"(?:=|\\(?:approx|simeq)\b|\s)+")
_OUTSIDE = " *`"
_SIDE_BY_SIDE = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\.?\d")
_WHOLE_TEXT_GROUP = re.compile(TEXT + r"([^{}]*\d[^{}]*)\}")
_EXPONENT = r"(?:\s*\^\s*(?:\d|\{\d\}))?"
_SCALE = r"(?:half|dozen|hundred|thousand|million|billion|trillion)s?\b"
_UNIT_IN_TEXT = re.compile(rf"(?<!\^)\s*{TEXT}(?!\s*{_SCALE})[^{{}}]*\}}{_EXPONENT}$")
_OPERAND = r"((?:[^a-zA-Z\\]|\\[a-zA-Z]+|\\[^a-zA-Z])*(?:[\d})]|\\pi))"  # no letter but in commands
_GLUED_UNIT = "cm|mm|km|dm|kg|mg|ml|lb"
_SHORT_UNIT = f"(?:{_GLUED_UNIT}|ft|in|yd|mi|sq|oz|hr)"
_NUMBER_AND_UNIT = re.compile(
    rf"{_OPERAND}"
    rf"(?:\s+(?!(?:and|or|percent\w*|pct|{_SCALE})\b)(?:[a-zA-Z]{{3,}}|{_SHORT_UNIT})(?:\s+[a-zA-Z]{{2,}})*"
    rf"|\s*(?:{_GLUED_UNIT}))\.?{_EXPONENT}"
)
_UNIT_LETTER = "[mgshlL]"
_NUMBER_AND_UNIT_LETTER = re.compile(rf"{_OPERAND}\s*{_UNIT_LETTER}{_EXPONENT}")
_NUMBER_SPACE_UNIT_LETTER = re.compile(rf"{_OPERAND}\s{_UNIT_LETTER}{_EXPONENT}")
_UNITS = re.compile(
    r"\b(?:(?P<mm>mm|millimet(?:er|re)s?)|(?P<cm>cm|centimet(?:er|re)s?)|(?P<m>m|met(?:er|re)s?)"
    r"|(?P<km>km|kilomet(?:er|re)s?)|(?P<inch>in|inch(?:es)?)|(?P<foot>ft|foot|feet)"
    r"|(?P<yard>yd|yards?)|(?P<mile>mi|miles?)|(?P<mg>mg|milligrams?)|(?P<g>g|grams?)"
    r"|(?P<kg>kg|kilograms?|kilos?)|(?P<ounce>oz|ounces?)|(?P<pound>lbs?|pounds?)|(?P<ton>tons?)"
    r"|(?P<ml>m[lL]|millilit(?:er|re)s?)|(?P<l>[lL]|lit(?:er|re)s?)|(?P<gallon>gal|gallons?)"
    r"|(?P<s>s|sec|seconds?)|(?P<min>mins?|minutes?)|(?P<h>h|hrs?|hours?)|(?P<day>days?)"
    r"|(?P<week>weeks?)|(?P<month>months?)|(?P<year>yrs?|years?)|(?P<dollar>dollars?)"
    r"|(?P<cent>cents?)|(?P<degree>deg|degrees?)|(?P<radian>rad|radians?))\b"
)
"""Only a unit of these tells one quantity from another; `5 apples` is 5."""
_UNIT_IN_SENTENCE = re.compile(rf"\s+(?!in\b)(?=\w\w){_UNITS.pattern}")
_BASE = re.compile(r"[\dA-Fa-f]+\s*_\s*\{?\s*(\d+)\s*\}?")


def cleaned(text: str) -> str:
    """Returns an expression in LaTeX, without marks and thin spaces."""
    text = " ".join(as_latex(text).split()).strip(_OUTSIDE)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = SPACED_THOUSANDS.sub(lambda number: "".join(number[0].split()), text)
    text = _PLAIN_PI.sub(r"\\pi", " ".join(text.split()).strip(_OUTSIDE))
    if left := _LEFT_OF_A_RIGHT_SIDE.match(text):
        text = text[left.end() :]
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].strip()
    if whole := _WHOLE_TEXT_GROUP.fullmatch(text):
        text = whole[1].strip()
    return text


def comparable(right: str, finals: list[str]) -> tuple[str, list[str]]:
    """Returns cleaned expressions ready for comparison: without units (a single letter after a
    number is one if the other side has no letters), and without the `finals` that the parser
    misreads or that are in another base or unit than `right`."""
    unit = _unit_of(right)
    finals = [final for final in finals if not unit or _unit_of(final) in (None, unit)]
    right, finals = _without_unit(right), list(map(_without_unit, finals))
    base = _base_of(right)
    finals = [final for final in finals if is_readable(final)]
    if base is not None:
        finals = [final for final in finals if _base_of(final) in (None, base)]
    if not has_letters(right):
        return right, [_first_group(_NUMBER_AND_UNIT_LETTER, final) for final in finals]
    if not any(map(has_letters, finals)):
        right = _first_group(_NUMBER_SPACE_UNIT_LETTER, right)
    return right, finals


def has_letters(text: str) -> bool:
    """Whether an expression has letters outside of commands."""
    return re.search(r"(?<![a-zA-Z\\])[a-zA-Z]", text) is not None


def unit_at(text: str, place: int = 0) -> str:
    """Returns the unit that follows a number in a sentence, with the space before it, or ""."""
    unit = _UNIT_IN_SENTENCE.match(text, place)
    return unit[0] if unit else ""


def _unit_of(text: str) -> str | None:
    number = _first_group(_NUMBER_AND_UNIT_LETTER, _without_unit(text))
    unit = _UNITS.search(text, len(number)) if number != text else None
    return unit.lastgroup if unit else None


def is_readable(text: str) -> bool:
    """Whether the parser reads the text as it is meant."""
    return _SIDE_BY_SIDE.search(text) is None


def _base_of(text: str) -> str | None:
    base = _BASE.fullmatch(text.strip())
    return base[1] if base else None


def _without_unit(text: str) -> str:
    without = _UNIT_IN_TEXT.sub("", text).strip()
    return _first_group(_NUMBER_AND_UNIT, without or text)


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.fullmatch(text)
    return match[1] if match else text


_WORD = r"[^\W\d_]+(?:['-][^\W\d_]+)*"
_WORDS = re.compile(rf"{_WORD}(?: {_WORD})*")
_SEPARATOR = re.compile(r",|;|\b(?:and|or)\b")
_CHOICE = re.compile(r"\(([a-zA-Z])\)(?=\s*(?:$|[\w\\.:]))")
_IN_BRACKETS = re.compile(r"[\[(](.*)[\])]")
_MARKUP = re.compile(r"\\[,;:! ]|\\q?quad\b|[$*`\"~{}]")
_FEWEST_LETTERS = 3  # of a word outside of `\text{}`; `xy` is a product
_SHORT_WORDS = {"no", "on", "up", "ok", "us", "uk"}
_ARTICLE = re.compile(r"(?:the|an?) (?=\w\w)", re.IGNORECASE)


def words_of(text: str, fewest_letters: int = _FEWEST_LETTERS) -> frozenset[str] | None:
    r"""Returns the answers in words, in lower case and without an article; None for a formula."""
    parts = [_without_brackets(part) for part in _SEPARATOR.split(TEXT_GROUP.sub(r" \1 ", text))]
    if not all(_WORDS.fullmatch(part) for part in parts):
        return None
    outside = TEXT_GROUP.sub("", text)
    words = [word.casefold() for part in parts for word in part.split()]
    are_words = max(map(len, words)) >= fewest_letters or not _SHORT_WORDS.isdisjoint(words)
    if not are_words and any(map(str.isalpha, outside)):
        return None
    return frozenset(_ARTICLE.sub("", part).casefold() for part in parts)


def choice_of(text: str) -> str | None:
    r"""Returns the letter of a choice (`(C)` or `\textbf{(C)}\ 25`) in lower case, or None."""
    choice = _CHOICE.match(_without_markup(TEXT_GROUP.sub(r" \1 ", text)))
    return choice[1].casefold() if choice else None


def _without_brackets(text: str) -> str:
    text = _without_markup(unicodedata.normalize("NFKC", text)).rstrip(". ")
    bracket = _IN_BRACKETS.fullmatch(text)
    return bracket[1].strip() if bracket else text


def _without_markup(text: str) -> str:
    return " ".join(_MARKUP.sub(" ", text).split())


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
