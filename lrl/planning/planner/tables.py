"""Tables that are printed whole: Rich would cut and break words to fit a narrow terminal, or a pipe's 80 columns."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def width_of(table: Table, console: Console) -> int:
    """Columns that a table takes with every cell on one line."""
    return Measurement.get(console, console.options.update(width=sys.maxsize), table).maximum


def room_of(console: Console) -> int:
    """Columns there are: a terminal's; a pipe or a file takes lines of any length."""
    return console.width if console.is_terminal else sys.maxsize


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as it is. A terminal that is narrower breaks its lines, and loses nothing."""
    table.width = width_of(table, console)
    console.print(table, crop=False, no_wrap=True, overflow="ignore")
