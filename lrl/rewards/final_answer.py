r"""The final answer of a response: the only part of its text that a verifier reads.

The first of these forms that the response has decides, right or wrong:

1. the last `\boxed{}`, `\fbox{}` or `<answer></answer>` with a content; of one within another, the
   inner one;
2. in the sentence after the last "answer is", "answer:" or `####`: the first formula (`$...$`,
   `$$...$$`, `\(...\)`, `\[...\]`), else the whole sentence if it has no words besides a number,
   else its first number;
3. the last formula;
4. the whole response if it is one line without words, else its last number.

What the response has written before, and may have withdrawn, does not count.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lrl.rewards.number_text import numbers_in

_MARK = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*|<answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_WITHOUT_BRACES = re.compile(r"(?:[^$\\\n]|\\[^)\]])*")
r"""The content of `\boxed 5`: the rest of its formula or line."""
_TAG_END = re.compile(r"</answer>|\Z", re.IGNORECASE)
_PHRASE = re.compile(
    r"(?:\banswers?\b[*_]*(?:\s+(?:to|of|for)\b[^.:=\n]{0,80}?)?\s*"
    r"(?:\b(?:is|are|(?:should|must|would|will) be)\b|[:=])|####)[\s*_:]*",
    re.IGNORECASE,
)
# A dollar sign with a space inside of it is money. No form runs over the beginning of the next
# one, so the search takes a time in proportion to the text, also of a text that never closes a
# formula.
_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$"
    r"|(?<![\\$])\$(?=[^\s$])((?:[^$\\]|\\.)*(?<!\s))\$(?!\d)"
    r"|\\\(((?:[^\\]|\\[^()])*)\\\)"
    r"|\\\[((?:[^\\]|\\[^\[\]])*)\\\]",
    re.DOTALL,
)
_SENTENCE = re.compile(r"(?:[^.\n]|\.(?=\S))*")
_NUMBER_FIRST = re.compile(r"-?\$?\.?\d")
_SEPARATOR = re.compile(
    r"(?:\s|[,;&$]|\\[,;:!()\[\]]|\\q?quad\b|\\text\s*\{\s*(?:and|or)\s*\}"
    r"|\b(?:and|or)\b|[a-zA-Z]_?\w?\s*=)*"
)
"""The text between two members of a list of answers."""
_WORD = re.compile(
    r"(?<![a-zA-Z\\{])(?!(?:and|or|sqrt|pi|sin|cos|tan|cot|log|ln)\b)"
    r"(?:[a-zA-Z]{3,}|\b(?i:is|it|so|of|to|in|we|at|by|be|he|as)\b)"
)
"""A word that is no name in mathematics; two letters may also be a product."""
_LONGEST_SEPARATOR = 40
_LONGEST_LIST = 20


class _Piece(NamedTuple):
    """A part of a text, which includes its marks."""

    start: int
    end: int
    content: str


def marked_answers(text: str) -> list[str]:
    r"""Returns the content of the last box or answer tag, then the contents of the list that ends
    with it.

    `\boxed{1} and \boxed{2}` gives `["2", "1,2"]`. Empty if no box and no tag has a content.
    """
    return _alone_and_listed(_trailing_list(text, _marked(text)))


def final_answers(text: str) -> list[str]:
    """Returns the final answer, and then the list of answers that it belongs to, if any.

    Empty if the text has none of the forms above.
    """
    marked = _trailing_list(text, _marked(text))
    if marked and text.startswith("<", marked[-1].start):
        return _stated_answers(marked[-1].content) or _alone_and_listed(marked)
    return _alone_and_listed(marked) or _stated_answers(text)


def _stated_answers(text: str) -> list[str]:
    """Returns the final answer in a form without a mark, as `marked_answers` does."""
    *_, phrase = [None, *_PHRASE.finditer(text)]
    if phrase is not None and (found := _answers_of_sentence(text, phrase.end())):
        return found
    if listed := _trailing_list(text, reversed(list(_formulas(text)))):
        return _alone_and_listed(listed)
    line = text.strip()
    if line and "\n" not in line and not _is_prose(line):
        return [line]
    return [number.text for number in numbers_in(text)[-1:]]


def _answers_of_sentence(text: str, start: int) -> list[str]:
    sentence = _SENTENCE.match(text, start)
    assert sentence is not None, "it may be empty"
    stated = sentence[0].strip()
    formulas = _formulas(text, start)
    first = next((formula for formula in formulas if formula.start <= sentence.end()), None)
    begins_with_number = _NUMBER_FIRST.match(stated) is not None
    if first is not None and (first.start == start or not begins_with_number):
        return _alone_and_listed(_leading_list(text, first, formulas), first)
    numbers = numbers_in(stated) if first is not None or _is_prose(stated) else []
    if numbers:
        return [numbers[0].text]
    return [stated] if stated else []


def _is_prose(text: str) -> bool:
    return _WORD.search(text) is not None


def _marked(text: str) -> Iterator[_Piece]:
    """Yields the boxes and tags with a content, the last one first."""
    for mark in reversed(list(_MARK.finditer(text))):
        start = mark.end()
        if text[mark.start()] == "<":
            end = _TAG_END.search(text, start)
            assert end is not None, "the end of the text is one"
            piece = _Piece(mark.start(), end.end(), text[start : end.start()])
        elif text.startswith("{", start):
            end_of_content = _closing_brace(text, start + 1)
            piece = _Piece(mark.start(), end_of_content + 1, text[start + 1 : end_of_content])
        else:
            content = _WITHOUT_BRACES.match(text, start)
            assert content is not None, "it may be empty"
            piece = _Piece(mark.start(), content.end(), content[0])
        if piece.content.strip():
            yield piece


def _closing_brace(text: str, start: int) -> int:
    """Returns the index of the brace that closes the one before `start`, or the end of the text."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return len(text)


def _formulas(text: str, start: int = 0) -> Iterator[_Piece]:
    for formula in _FORMULA.finditer(text, start):
        yield _Piece(formula.start(), formula.end(), next(filter(None, formula.groups()), ""))


def _trailing_list(text: str, from_the_end: Iterable[_Piece]) -> list[_Piece]:
    """Returns the list of pieces that ends with the last one; often that one alone."""
    listed: list[_Piece] = []
    for piece in from_the_end:
        if listed and not _is_separator(text, piece.end, listed[0].start):
            break
        listed.insert(0, piece)
        if len(listed) == _LONGEST_LIST:
            break
    return listed


def _leading_list(text: str, first: _Piece, others: Iterable[_Piece]) -> list[_Piece]:
    """Returns the list of pieces that begins with `first`; often that one alone."""
    listed = [first]
    for piece in others:
        if not _is_separator(text, listed[-1].end, piece.start):
            break
        listed.append(piece)
        if len(listed) == _LONGEST_LIST:
            break
    return listed


def _is_separator(text: str, start: int, end: int) -> bool:
    if not 0 <= end - start <= _LONGEST_SEPARATOR:  # below 0 if one box is in the other
        return False
    return _SEPARATOR.fullmatch(text, start, end) is not None


def _alone_and_listed(listed: list[_Piece], alone: _Piece | None = None) -> list[str]:
    """Returns the content of one piece, by default the last one, and of all if they are several."""
    if not listed:
        return []
    contents = [piece.content.strip() for piece in listed]
    chosen = (alone or listed[-1]).content.strip()
    return [chosen, ",".join(contents)] if len(contents) > 1 else [chosen]
