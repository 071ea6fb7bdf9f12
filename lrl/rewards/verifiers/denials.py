r"""What a response denies: "not 42", "isn't $42$", "rather than \boxed{42}", "42 is wrong".

Boxes, formulas and numbers are found first; then the words right before and behind each are read.
"""

import re

# A dollar sign with a space inside of it is money. No form runs over the beginning of the next
# one, so the search takes a time in proportion to the text, also of a text that never closes a
# formula.
FORMULA = re.compile(
    r"\$\$([^$]+)\$\$"
    r"|(?<![\\$])\$(?=[^\s$])((?:[^$\\]|\\.)*(?<!\s))\$(?!\d)"
    r"|\\\(((?:[^\\]|\\[^()])*)\\\)"
    r"|\\\[((?:[^\\]|\\[^\[\]])*)\\\]",
    re.DOTALL,
)
_BOX = r"\\(?:boxed|fbox)\s*\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*+\})*+\})*+\}"
_NUMBER = (
    r"[-+]?\\?\$?(?:\\[dtc]?frac\s*\{[^{}]*+\}\s*\{[^{}]*+\}"
    r"|(?<!\d)(?<!\d[.,/])\.?\d++(?:[.,/]\d++)*+)"
    r"(?:\s*(?:\\times|\\cdot|[*/^])\s*\{?-?\d++\}?){0,3}+"
)
_BOX_FORMULA_OR_NUMBER = re.compile(
    rf"(?=[-+.$\\\d])(?:{_BOX}|{FORMULA.pattern}|{_NUMBER})", re.IGNORECASE | re.DOTALL
)
_DENIAL = re.compile(
    r"[\s,;(]*(?:(?:and|but)\s+)?(?:n['’]t|\b(?:not|cannot|never|neither|nor|without|except|unlike"
    r"|isnt|instead\s+of|anything\s+but|far\s+from|no\s+longer|rul(?:e|es|ed|ing)\s+out"
    r"|(?<!no more )(?<!no less )(?<!no fewer )(?<!not more )(?<!not less )than))\b"
    r"(?:[\s*_:\"'({]|\b(?:[a-z]+ly|an?|be|been|equals?|to|the|just|even|number|value)\b)*\Z",
    re.IGNORECASE,
)
"""The words before what they deny."""
_LONGEST_DENIAL = 80
_REJECTION = re.compile(
    r"(?:[\s*_]+(?:is|was|are|were|would\s+be)(?:\s+[a-z]+ly)?\s+"
    r"(?:wrong|incorrect|false|not\s+(?:right|correct|(?:the\s+)?(?:[a-z]+\s+)?answer))\b"
    r"|\?\s+(?:no|nope|wrong)\b)[.,]?",
    re.IGNORECASE,
)
"""The words behind what they deny."""
_OR = re.compile(r",?\s+n?or\s+", re.IGNORECASE)


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
