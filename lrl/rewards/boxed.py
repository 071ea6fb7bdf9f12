r"""The final answer of a response: the content of its last `\boxed{}`."""


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{}`; None if there is none, or if the text ends inside of it."""
    _, box, rest = text.rpartition(r"\boxed{")
    depth = 1
    for end, char in enumerate(rest if box else ""):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[:end]
    return None
