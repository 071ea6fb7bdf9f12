r"""Where an answer commits itself: the last `\boxed{}`."""

from __future__ import annotations


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{}` holds; None if there is none, or the text was cut before it closed."""
    _, box, rest = text.rpartition(r"\boxed{")
    depth = 1
    for end, char in enumerate(rest if box else ""):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[:end]
    return None
