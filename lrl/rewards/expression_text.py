r"""The text of one expression, made ready for math-verify's parser.

The parser adds numbers that stand side by side (`5 7` and `5(7)` are 12) and ignores the base of a
number (`52_8` is 52), so both are treated here. So are units: the parser's own list has single
letters, and would make 3 of `3t`.
"""

import re

from lrl.rewards.number_text import SPACED_THOUSANDS
from lrl.rewards.unicode_math import as_latex

_PLAIN_PI = re.compile(
    r"(?<![a-zA-Z\\])(?<!text\{)(?<!mathrm\{)(?<!mbox\{)(?<!name\{)pi(?![a-zA-Z])"
)
_MARKS = re.compile(r"(?<!\\)\\[()\[\]]|\$")
_NO_SPACE = re.compile(r"(?<!\\)\\!\s*|\\displaystyle\b|\\(?:large|Large|bf|rm|it)\b")
_SPACE = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad\b)|~")
_LOOKS = re.compile(
    r"\\(?:boldsymbol|bm|underline|textcolor\s*\{[^{}]*\}|color\s*\{[^{}]*\})(?![a-zA-Z])"
)
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)")
_POWER = re.compile(r"\*\*\s*(-?\d+)")
_MIXED_NUMBER = re.compile(r"(?<![\d.,/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]\+?(-?\d+)(?![\w.])")
_NUMBER_BEFORE_BRACKET = re.compile(r"(?<![_^\d.])(\d[\d.]*)\s*(?=(?:\\left\s*)?\()")
_BRACKET_BEFORE_FACTOR = re.compile(r"\)\s*(?=(?:\\left\s*)?\(|\d)")
_REPLACED = [
    (_MARKS, " "),
    (_NO_SPACE, ""),
    (_SPACE, " "),
    (_LOOKS, ""),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"\{\s*,\s*\}"), ","),
    (_SHORT_FRACTION, r"\\frac{\1}{\2}"),
    (_POWER, r"^{\1}"),
    (re.compile(r"\*\*"), "^"),
    (_MIXED_NUMBER, r"\1\\frac{\2}{\3}"),
    (_SCIENTIFIC, r"\1 \\times 10^{\2}"),
    (_NUMBER_BEFORE_BRACKET, r"\1 \\cdot "),
    (_BRACKET_BEFORE_FACTOR, r") \\cdot "),
]
_LEFT_OF_A_RIGHT_SIDE = re.compile(r"(?:=|\\(?:approx|simeq)\b|\s)+")
"""The text that may stand before an expression that is only its right side."""
_OUTSIDE = " *`"
_SIDE_BY_SIDE = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\.?\d")
_TEXT = r"\\(?:text(?:bf|it|rm)?|math(?:bf|rm|it)|mbox)\s*\{"
_WHOLE_TEXT_GROUP = re.compile(_TEXT + r"([^{}]*\d[^{}]*)\}")
_EXPONENT = r"(?:\s*\^\s*(?:\d|\{\d\}))?"
_SCALE = r"(?:half|dozen|hundred|thousand|million|billion|trillion)s?\b"
_UNIT_IN_TEXT = re.compile(rf"\s*{_TEXT}(?!\s*{_SCALE})[^{{}}]*\}}{_EXPONENT}$")
_NUMBER = r"((?:[^a-zA-Z\\]|\\[a-zA-Z]+|\\[^a-zA-Z])*(?:[\d})]|\\pi))"  # no letter but in commands
_GLUED_UNIT = "cm|mm|km|dm|kg|mg|ml|lb"
_SHORT_UNIT = f"(?:{_GLUED_UNIT}|ft|in|yd|mi|sq|oz|hr)"
_NUMBER_AND_UNIT = re.compile(
    rf"{_NUMBER}"
    rf"(?:\s+(?!(?:and|or|percent\w*|pct|{_SCALE})\b)(?:[a-zA-Z]{{3,}}|{_SHORT_UNIT})(?:\s+[a-zA-Z]{{2,}})*"
    rf"|\s*(?:{_GLUED_UNIT}))\.?{_EXPONENT}"
)
_UNIT_LETTER = "[mgshlL]"
_NUMBER_AND_UNIT_LETTER = re.compile(rf"{_NUMBER}\s*{_UNIT_LETTER}")
_NUMBER_SPACE_UNIT_LETTER = re.compile(rf"{_NUMBER}\s{_UNIT_LETTER}")
_BASE = re.compile(r"[\dA-Fa-f]+\s*_\s*\{?\s*(\d+)\s*\}?")


def cleaned(text: str) -> str:
    """Returns an expression in LaTeX, without marks, units and thin spaces."""
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
    return _without_unit(text)


def comparable(right: str, finals: list[str]) -> tuple[str, list[str]]:
    """Returns cleaned expressions that can equal `right`, ready for comparison.

    A single letter after a number is left out as a unit if the other side has no letters. The
    `finals` that the parser misreads, or that are in another base than `right`, are left out.
    """
    base = _base_of(right)
    finals = [final for final in finals if is_readable(final)]
    if base is not None:
        finals = [final for final in finals if _base_of(final) in (None, base)]
    if not _has_letters(right):
        return right, [_first_group(_NUMBER_AND_UNIT_LETTER, final) for final in finals]
    if not any(map(_has_letters, finals)):
        right = _first_group(_NUMBER_SPACE_UNIT_LETTER, right)
    return right, finals


def _has_letters(text: str) -> bool:
    """Returns whether an expression has letters outside of commands."""
    return re.search(r"(?<![a-zA-Z\\])[a-zA-Z]", text) is not None


def is_readable(text: str) -> bool:
    """Returns whether the parser reads the text as it is meant."""
    return _SIDE_BY_SIDE.search(text) is None


def _base_of(text: str) -> str | None:
    """Returns the base of a number such as `52_8`; None if none is named."""
    base = _BASE.fullmatch(text.strip())
    return base[1] if base else None


def _without_unit(text: str) -> str:
    without = _UNIT_IN_TEXT.sub("", text).strip()
    return _first_group(_NUMBER_AND_UNIT, without or text)


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.fullmatch(text)
    return match[1] if match else text
