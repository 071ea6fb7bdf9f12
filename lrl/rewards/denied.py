r"""What a response denies: "not 42", "isn't $42$", "rather than \boxed{42}", "42 is wrong"."""

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
_PIECE = f"(?:{_BOX}|{FORMULA.pattern}|{_NUMBER})"
_DENIAL = (
    r"(?:(?<![\s,;(])[\s,;(]++(?:(?:and|but)\s++)?)?+"
    r"(?:\b(?:not|cannot|never|neither|nor|without|except|unlike|isnt|instead\s+of"
    r"|anything\s+but|far\s+from|no\s+longer|rul(?:e|es|ed|ing)\s+out"
    r"|(?<!no more )(?<!no less )(?<!no fewer )(?<!not more )(?<!not less )than)\b|n['’]t\b)"
    r"(?:[\s*_:\"'({]|\b(?:[a-z]+ly|an?|be|been|equals?|to|the|just|even|number|value)\b)*+"
)
_REJECTION = (
    r"(?:[\s*_]+(?:is|was|are|were|would\s+be)(?:\s+[a-z]+ly)?\s+"
    r"(?:wrong|incorrect|false|not\s+(?:right|correct|(?:the\s+)?(?:[a-z]+\s+)?answer))\b"
    r"|\?\s+(?:no|nope|wrong)\b)[.,]?"
)
_DENIED = re.compile(
    rf"(?=[-+.$\\\d]){_PIECE}{_REJECTION}|(?=[\\$])(?P<kept>{_BOX}|{FORMULA.pattern})"
    rf"|(?=[\s,;(acefinrtuw]){_DENIAL}{_PIECE}(?:,?\s+n?or\s+{_PIECE})*,?",
    re.IGNORECASE | re.DOTALL,
)


def without_denied(text: str) -> str:
    """Returns the text without the boxes, formulas and numbers that it denies; what stands in a box
    or a formula stays as it is."""
    return _DENIED.sub(lambda found: found["kept"] or " ", text)


def is_withdrawn(answer: str, text: str) -> bool:
    """Returns whether the text has denied an answer where it wrote it last."""
    written = re.finditer(rf"(?<![\d.]){re.escape(answer)}(?!\.?\d)", text)
    last = max((found.start() for found in written), default=-1)
    denied = (found for found in _DENIED.finditer(text) if found["kept"] is None)
    return any(found.start() <= last < found.end() for found in denied)
