"""What went wrong, out of vLLM's log: the line of the exception that ended a generator.

A log ends with the exception of its last process, and that one often only says that another process has failed ("See
root cause above"). The exception meant is the last one that does not point at another.
"""

from __future__ import annotations

import re

PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:\w+ \S+ \S+ \[[^\]]*\] )?")
"""What vLLM writes before each line of a process, and before each that it logs."""
EXCEPTION = re.compile(r"^[\w.]*(?:Error|Exception)(?:: |$)")
ARGUMENT = re.compile(r"^\S+: error: ")
"""What argparse writes of a wrong flag."""
POINTS_AT_ANOTHER = re.compile(r"see (?:the )?(?:root cause|stack ?trace)", re.IGNORECASE)
DETAIL = re.compile(r" \[type=\w+, input_value=.*")
"""What pydantic adds: the value that was wrong, with everything that it was part of."""
LONGEST = 800
"""Characters."""


def cause(log: str) -> str:
    """The exception that ended the process which wrote `log`, its type and message; empty if there is none."""
    lines = [PREFIX.sub("", line) for line in log.splitlines()]
    for number in reversed(range(len(lines))):
        told = EXCEPTION.match(lines[number]) or ARGUMENT.match(lines[number])
        if told and not POINTS_AT_ANOTHER.search(lines[number]):
            return " ".join([lines[number], *_going_on(lines[number + 1 :])])[:LONGEST]
    return ""


def _going_on(lines: list[str]) -> list[str]:
    """The lines of a message behind its first, which pydantic indents."""
    message = []
    for line in lines:
        if not line.startswith("  ") or line.lstrip().startswith(("For further information", "File ")):
            break
        message.append(DETAIL.sub("", line).strip())
    return message
