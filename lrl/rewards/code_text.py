"""What `Code` reads of a response: its program and its output."""

import re
import textwrap

# Without a step back (`+` behind each): a policy writes lines of any length, and the time would grow
# with its square.
_FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([\w+#.-]*+)[^`]*+")
_PYTHON = ("python", "py", "python3")


def program_in(response: str) -> str | None:
    """Returns the last fenced block that is named as Python, else the last one without a name;
    None if there is neither. A block that is not closed is none."""
    named = None
    unnamed = None
    fence = ""
    language = ""
    lines: list[str] = []
    for line in response.split("\n"):  # not splitlines(): a program may hold other line ends
        found = _FENCE.fullmatch(line)
        if not fence:
            if found is not None:
                fence, language = found[1], found[2].lower()
                lines = []
        elif found is not None and found[1].startswith(fence) and not found[2]:
            if language in _PYTHON:
                named = lines
            elif not language:
                unnamed = lines
            fence = ""
        else:
            lines.append(line)
    block = unnamed if named is None else named
    return None if block is None else textwrap.dedent("\n".join(block) + "\n")


def is_same_output(written: bytes, right: str) -> bool:
    """Whether two outputs are equal, apart from white space at the ends of lines and of the
    text."""
    return _lines(written.decode(errors="replace")) == _lines(right)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
