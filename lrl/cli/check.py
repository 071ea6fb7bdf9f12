"""One finding of `lrl doctor`, and how findings are shown."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

STYLES = {"ok": "green", "warning": "yellow", "wrong": "bold red"}
STATUS_WIDTH = max(map(len, STYLES))
GAP = "  "


@dataclass(frozen=True, slots=True)
class Check:
    """State of one part of the machine, and the command that repairs it (empty when the status is
    ok)."""

    name: str
    status: Literal["ok", "warning", "wrong"]
    """`warning`: runs work, with a limit. `wrong`: they do not."""
    found: str
    """What the machine has, or lacks."""
    remedy: str = ""


def show(rows: Sequence[Check]) -> int:
    """Prints all checks; returns the exit status, 1 if one of them is wrong."""
    count = Counter(check.status for check in rows)
    console = Console(highlight=False)
    width = max(len(check.name) for check in rows)
    for check in rows:
        status = Text(f"{check.status:<{STATUS_WIDTH}}", STYLES[check.status])
        name = Text(f"{check.name:<{width}}", "bold")
        # soft_wrap: of a command that Rich wraps, a pasted first line would run alone.
        console.print(Text(GAP).join((status, name, Text(check.found))), soft_wrap=True)
        if check.remedy:
            indent = " " * (STATUS_WIDTH + len(GAP) + width + len(GAP))
            console.print(Text(f"{indent}type: {check.remedy}", "cyan"), soft_wrap=True)
    console.print(f"{count['wrong']} wrong, {count['warning']} with a limit, {count['ok']} ok.")
    return int(count["wrong"] > 0)
