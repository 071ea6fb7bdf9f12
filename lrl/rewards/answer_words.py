r"""Answers in words (`\text{east}`, `no solution`, `(C)`), compared as text.

A parser of formulas reads `east` as the product e·a·s·t, which is that of `seat`, too.
"""

import re
import unicodedata

from lrl.rewards.number_text import TEXT_GROUP

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
    parts = [_cleaned(part) for part in _SEPARATOR.split(TEXT_GROUP.sub(r" \1 ", text))]
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


def _cleaned(text: str) -> str:
    text = _without_markup(unicodedata.normalize("NFKC", text)).rstrip(". ")
    bracket = _IN_BRACKETS.fullmatch(text)
    return bracket[1].strip() if bracket else text


def _without_markup(text: str) -> str:
    """Returns the text without LaTeX's spaces and marks, with single spaces."""
    return " ".join(_MARKUP.sub(" ", text).split())
