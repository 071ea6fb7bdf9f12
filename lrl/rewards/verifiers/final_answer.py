r"""The final answer of a response, the only part that a verifier reads, and `GSM8K`, for which it
is a number. The first form that the response has decides, right or wrong (docs/rewards.md)."""

import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import chain, islice
from typing import Any, NamedTuple

from lrl.rewards.base import Reward, reference_of
from lrl.rewards.verifiers import expression

_MARK = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*|<answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_WITHOUT_BRACES = re.compile(r"(?:[^$\\\n]|\\[^)\]])*")  # `\boxed 5`: the rest of a formula or line
_TAG_END = re.compile(r"</answer>|\Z", re.IGNORECASE)
_PHRASE = re.compile(
    r"(?:\banswers?\b[*_]*(?:\s+(?:to|of|for)\b[^.:=\n]{0,80}?)?\s*"
    r"(?:\b(?:is|are|(?:should|must|would|will|could|can|may|might) be)\b|[:=])|####)[\s*_:]*",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"(?:[^.\n]|\.(?=\S))*")
_CLAUSE = re.compile(r"(?:(?!,\s+[a-zA-Z]|\b(?:because|since)\b|\.\s).)*")
_VALUE_FOLLOWS = re.compile(
    r"\s+(?:is|are|equals?|be)(?:\s+(?:thus|then|therefore|equal\s+to|exactly))?[\s:*_]+"
    r"(?=[-+$\\(\d.])"
)
"""Between a name (`$n$`, "the largest number") and what it is."""
_NUMBER_FIRST = re.compile(r"-?\$?\.?\d")
_SEPARATOR = re.compile(
    r"(?:\s|[,;&$]|\\[,;:!()\[\]]|\\q?quad\b|\\text\s*\{\s*(?:and|or)\s*\}"
    r"|\b(?:and|or)\b|[a-zA-Z]_?\w?\s*=)*"
)
# A word that is not a name in mathematics; two letters may also be a product.
_WORD = re.compile(
    r"(?<![a-zA-Z\\{])(?!(?:and|or|sqrt|pi|sin|cos|tan|cot|log|ln)\b)"
    r"(?:[a-zA-Z]{3,}|\b(?i:is|it|so|of|to|in|we|at|by|be|he|as)\b)"
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
_BOX = r"\\(?:boxed|fbox)\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_DENIED_NUMBER = (
    r"[-+]?\\?\$?(?:\\[dtc]?frac\s*\{[^{}]*+\}\s*\{[^{}]*+\}"
    r"|(?<!\d)(?<!\d[.,/])\.?\d++(?:[.,/]\d++)*+)"
    r"(?:\s*(?:\\times|\\cdot|[*/^])\s*\{?-?\d++\}?){0,3}+"
)
_BOX_FORMULA_OR_NUMBER = re.compile(
    rf"(?=[-+.$\\\d])(?:{_BOX}|{_FORMULA.pattern}|{_DENIED_NUMBER})", re.IGNORECASE | re.DOTALL
)
_DENIAL = re.compile(
    r"[\s,;(]*(?:(?:and|but)\s+)?(?:n['’]t|\b(?:not|cannot|never|neither|nor|without|except|unlike"
    r"|isnt|instead\s+of|anything\s+but|far\s+from|no\s+longer|rul(?:e|es|ed|ing)\s+out"
    r"|(?<!no more )(?<!no less )(?<!no fewer )(?<!not more )(?<!not less )than))\b"
    r"(?:[\s*_:\"'({]|\b(?:[a-z]+ly|an?|be|been|equals?|to|the|just|even|number|value)\b)*\Z",
    re.IGNORECASE,
)
_LONGEST_DENIAL = 80
_REJECTION = re.compile(
    r"(?:[\s*_]+(?:is|was|are|were|would\s+be)(?:\s+[a-z]+ly)?\s+"
    r"(?:wrong|incorrect|false|not\s+(?:right|correct|(?:the\s+)?(?:[a-z]+\s+)?answer))\b"
    r"|\?\s+(?:no|nope|wrong)\b)[.,]?",
    re.IGNORECASE,
)
_OR = re.compile(r",?\s+n?or\s+", re.IGNORECASE)


class _Piece(NamedTuple):
    start: int
    end: int  # marks included
    content: str


def marked_answers(text: str) -> list[str]:
    r"""Returns the content of the last box or answer tag that has one, then of the list that ends
    with it: `["2", "1,2"]` for `\boxed{1} and \boxed{2}`."""
    return _alone_and_listed(_listed(text, _marked(text)))


def final_answers(text: str) -> list[str]:
    """Returns the final answer, then the list of answers that it belongs to, if any."""
    text, written = without_denied(text), text
    marked = _listed(text, _marked(text))
    if marked and text.startswith("<", marked[-1].start):
        return _stated_answers(marked[-1].content) or _alone_and_listed(marked)
    stated = _alone_and_listed(marked) or _stated_answers(text)
    return [] if not marked and any(is_withdrawn(one, written) for one in stated) else stated


def _stated_answers(text: str) -> list[str]:
    """Returns what `final_answers` does, of a text without marks."""
    *_, phrase = [None, *_PHRASE.finditer(text)]
    if phrase is not None and (found := _answers_of_sentence(text, phrase.end())):
        return found
    if listed := _listed(text, reversed(list(_formulas(text)))):
        value = _value_of(text, listed[-1])
        return _alone_and_listed(listed) if value is None else _answers_of_sentence(text, value)
    lines = text.strip().splitlines()
    if len(lines) == 1 and not _is_prose(lines[0]):
        return lines
    numbers = [_with_unit(number) for number in expression.numbers_in(text)[-1:]]
    return numbers or [line for line in lines[-1:] if expression.words_of(line)]


def _value_of(text: str, name: _Piece) -> int | None:
    """Returns where the value of a name begins (`$n$ is 34`), or None for another formula."""
    value = _VALUE_FOLLOWS.match(text, name.end)
    is_name = expression.has_letters(name.content) and "=" not in name.content
    return value.end() if value and is_name else None


def _start_of_value(text: str, start: int) -> int:
    """Returns where a statement that begins with a name has its value."""
    clause = _CLAUSE.match(text, start)
    assert clause is not None, "it may be empty"
    first = next(_formulas(text, start), None)
    begins_with_name = first and first.start == start and _value_of(text, first) is not None
    if not begins_with_name and not clause[0][:1].isalpha():
        return start
    values = _VALUE_FOLLOWS.finditer(text, start, clause.end())
    return max((value.end() for value in values), default=start)


def _answers_of_sentence(text: str, start: int) -> list[str]:
    start = _start_of_value(text, start)
    sentence = _SENTENCE.match(text, start)
    assert sentence is not None, "it may be empty"
    stated = sentence[0].strip()
    formulas = _formulas(text, start)
    first = next((formula for formula in formulas if formula.start <= sentence.end()), None)
    begins_with_number = _NUMBER_FIRST.match(stated) is not None
    if first is not None and (first.start == start or not begins_with_number):
        return _alone_and_listed(_listed(text, chain([first], formulas)), first)
    numbers = expression.numbers_in(stated) if first is not None or _is_prose(stated) else []
    if numbers:
        return [_with_unit(numbers[0])]
    return [stated] if stated else []


def _with_unit(number: re.Match[str]) -> str:
    return number[0] + expression.unit_at(number.string, number.end())


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
        content = next(filter(None, formula.groups()), "")
        is_number = content[-1:].isdigit() and not expression.has_letters(content)
        unit = expression.unit_at(text, formula.end()) if is_number else ""
        yield _Piece(formula.start(), formula.end(), content + unit)


def _listed(text: str, pieces: Iterable[_Piece]) -> list[_Piece]:
    """Returns the list that begins or ends with the first piece; often that one alone."""
    listed: list[_Piece] = []
    for piece in islice(pieces, 20):
        if listed:
            left, right = sorted((listed[-1], piece))
            is_near = 0 <= right.start - left.end <= 40  # below 0 if one box is in the other
            if not is_near or not _SEPARATOR.fullmatch(text, left.end, right.start):
                break
        listed.append(piece)
    return sorted(listed)


def _alone_and_listed(listed: list[_Piece], alone: _Piece | None = None) -> list[str]:
    """Returns the content of one piece, by default the last, and of all if they are several."""
    contents = [piece.content.strip() for piece in listed]
    chosen = [piece.content.strip() for piece in ([alone] if alone else listed[-1:])]
    return [*chosen, ",".join(contents)] if len(contents) > 1 else chosen


def without_denied(text: str) -> str:
    """Returns the text without the boxes, formulas and numbers that it denies."""
    denials = _denials(text)
    ends = [0, *(end for _, end in denials)]
    starts = [*(start for start, _ in denials), len(text)]
    return " ".join(text[end:start] for end, start in zip(ends, starts, strict=True))


def is_withdrawn(answer: str, text: str) -> bool:
    """Returns whether the text has denied an answer where it wrote it last."""
    written = re.finditer(rf"(?<![\d.]){re.escape(answer)}(?!\.?\d)", text)
    last = max((found.start() for found in written), default=-1)
    return any(start <= last < end for start, end in _denials(text))


def _denials(text: str) -> list[tuple[int, int]]:
    """Returns where each denial starts and ends, with what it denies."""
    denials: list[tuple[int, int]] = []
    last = 0
    listed = False  # "neither 42 nor 7"
    for piece in _BOX_FORMULA_OR_NUMBER.finditer(text):
        start, end = piece.span()
        denial = _DENIAL.search(text, max(last, start - _LONGEST_DENIAL), start)
        listed = denial is not None or (listed and _OR.fullmatch(text, last, start) is not None)
        rejection = _REJECTION.match(text, end)
        if listed:
            start = denial.start() if denial else last
            last = end + text.startswith(",", end)
        elif rejection:
            last = rejection.end()
        else:
            continue
        denials.append((start, last))
    return denials


# ---- a number

_BEFORE_THE_NUMBER = re.compile(
    r"####[\s*_(\\]*(?:(?:the\s+)?(?:final\s+)?answer[\s*_]*(?:is\b)?[\s:*_(\\]*)?"
    r"(?=-?(?:\\?\$)?(?:\.?\d|\\[dtc]?frac))",
    re.IGNORECASE,
)


class GSM8K(Reward):
    r"""1 if the final number of the response is the right one, else 0 (2110.14168). Separators,
    units, signs of currency and percent, fractions and powers of ten do not matter."""

    name = "gsm8k"
    binary = True

    def check_row(self, columns: Mapping[str, Any]) -> None:
        _reference_number(columns)

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """The column `answer` is in the form of GSM8K (`... #### 72`), or has one number."""
        return float(final_number(response) == _reference_number(columns))


def final_number(text: str) -> Fraction | None:
    """Returns the number in the last box or answer tag (the only one there, after its last `=`),
    else after the last `####`, else the last one; None if there is none."""
    text, written = without_denied(text), text
    if marked := marked_answers(text):
        return expression.one_number(marked[0].rpartition("=")[2], spaced=True)
    *_, hashes = [None, *_BEFORE_THE_NUMBER.finditer(text)]
    if hashes is not None and (numbers := expression.numbers_in(text[hashes.end() :])):
        return expression.value_of(numbers[0])
    numbers = expression.numbers_in(text)
    is_stated = numbers and not is_withdrawn(numbers[-1][0], written)
    return expression.value_of(numbers[-1]) if is_stated else None


def _reference_number(columns: Mapping[str, Any]) -> Fraction:
    answer = reference_of(columns, "answer")
    if "####" in answer:
        number = expression.one_number(answer.rpartition("####")[2])
    else:
        number = expression.one_number([*marked_answers(answer), answer][0])
    if number is None or isinstance(columns["answer"], bool):
        raise ValueError(
            f"the column `answer` is {columns['answer']!r:.200}; GSM8K compares numbers, so it "
            "must have exactly one, after `####` if there is more text"
        )
    return number
