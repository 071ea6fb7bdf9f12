r"""The text of one expression, made ready for math-verify's parser.

The parser adds numbers that stand side by side (`5 7` and `5(7)` are 12) and ignores the base of a
number (`52_8` is 52), so both are treated here. So are units: the parser's own list has single
letters, and would make 3 of `3t`.

Answers in words (`\text{east}`, `no solution`, `(C)`) are compared as text: the parser reads `east`
as the product e·a·s·t, which is that of `seat`, too.
"""

import re
import unicodedata

from lrl.rewards.verifiers.number_text import SPACED_THOUSANDS, TEXT, TEXT_GROUP, as_latex

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
_WHOLE_TEXT_GROUP = re.compile(TEXT + r"([^{}]*\d[^{}]*)\}")
_EXPONENT = r"(?:\s*\^\s*(?:\d|\{\d\}))?"
_SCALE = r"(?:half|dozen|hundred|thousand|million|billion|trillion)s?\b"
_UNIT_IN_TEXT = re.compile(rf"(?<!\^)\s*{TEXT}(?!\s*{_SCALE})[^{{}}]*\}}{_EXPONENT}$")
_NUMBER = r"((?:[^a-zA-Z\\]|\\[a-zA-Z]+|\\[^a-zA-Z])*(?:[\d})]|\\pi))"  # no letter but in commands
_GLUED_UNIT = "cm|mm|km|dm|kg|mg|ml|lb"
_SHORT_UNIT = f"(?:{_GLUED_UNIT}|ft|in|yd|mi|sq|oz|hr)"
_NUMBER_AND_UNIT = re.compile(
    rf"{_NUMBER}"
    rf"(?:\s+(?!(?:and|or|percent\w*|pct|{_SCALE})\b)(?:[a-zA-Z]{{3,}}|{_SHORT_UNIT})(?:\s+[a-zA-Z]{{2,}})*"
    rf"|\s*(?:{_GLUED_UNIT}))\.?{_EXPONENT}"
)
_UNIT_LETTER = "[mgshlL]"
_NUMBER_AND_UNIT_LETTER = re.compile(rf"{_NUMBER}\s*{_UNIT_LETTER}{_EXPONENT}")
_NUMBER_SPACE_UNIT_LETTER = re.compile(rf"{_NUMBER}\s{_UNIT_LETTER}{_EXPONENT}")
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
    """Returns cleaned expressions that can equal `right`, ready for comparison.

    Units are left out, and a single letter after a number is one if the other side has no letters.
    The `finals` that the parser misreads, or that are in another base or unit than `right`, are
    left out.
    """
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
    """Returns whether an expression has letters outside of commands."""
    return re.search(r"(?<![a-zA-Z\\])[a-zA-Z]", text) is not None


def unit_at(text: str, place: int = 0) -> str:
    """Returns the unit that follows a number in a sentence, with the space before it, or ""."""
    unit = _UNIT_IN_SENTENCE.match(text, place)
    return unit[0] if unit else ""


def _unit_of(text: str) -> str | None:
    """Returns the name of the unit after a number; None if there is none, or an unknown one."""
    number = _first_group(_NUMBER_AND_UNIT_LETTER, _without_unit(text))
    unit = _UNITS.search(text, len(number)) if number != text else None
    return unit.lastgroup if unit else None


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


_WORD = r"[^\W\d_]+(?:['-][^\W\d_]+)*"
_WORDS = re.compile(rf"{_WORD}(?: {_WORD})*")
_SEPARATOR = re.compile(r",|;|\b(?:and|or)\b")
_CHOICE = re.compile(r"\(([a-zA-Z])\)(?=\s*(?:$|[\w\\.:]))")
_IN_BRACKETS = re.compile(r"[\[(](.*)[\])]")
_MARKUP = re.compile(r"\\[,;:! ]|\\q?quad\b|[$*`\"~{}]")
_FEWEST_LETTERS = 3
r"""Of a word outside of `\text{}`; `xy` is a product."""
_SHORT_WORDS = {"no", "on", "up", "ok", "us", "uk"}
_ARTICLE = re.compile(r"(?:the|an?) (?=\w\w)", re.IGNORECASE)


def words_of(text: str, fewest_letters: int = _FEWEST_LETTERS) -> frozenset[str] | None:
    r"""Returns the answers in words, in lower case and without an article; None for a formula.

    Letters outside of `\text{}` are words if `fewest_letters` or more of them are together.
    """
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
    """Returns one answer in words, without markup and brackets around it."""
    text = _without_markup(unicodedata.normalize("NFKC", text)).rstrip(". ")
    bracket = _IN_BRACKETS.fullmatch(text)
    return bracket[1].strip() if bracket else text


def _without_markup(text: str) -> str:
    """Returns the text without LaTeX's spaces and marks, with single spaces."""
    return " ".join(_MARKUP.sub(" ", text).split())
