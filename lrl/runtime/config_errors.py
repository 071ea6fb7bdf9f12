"""Faults of a configuration: raised one by one, or noted and reported all together.

A constructor that finds a wrong setting calls `fault`. In a script that raises at once. The command line and the checks
before a run open `collected` first: then the fault is only noted, building goes on with the wrong value, and one error
at the end names them all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType


class ConfigError(ValueError):
    """A setting, or what it names, is wrong: the message names it, its value and the remedy.

    Where nothing catches it, a script ends with the message alone, as the command does, and with status 1. The lines of
    lrl and Lightning that the wrong value went through would hide it.
    """

    shown_alone = True
    """Read by the hook below, of any error: its message says all that there is to know."""


EXPECTED = (ValueError, FileNotFoundError)
"""What bad input raises."""
SHOWN = 8
"""Faults that are named; more are counted."""
LONGEST = 600
"""Characters of one fault."""

_noted: ContextVar[list[str] | None] = ContextVar("lrl_faults", default=None)


def fault(text: str) -> None:
    """Say that a setting, or what it names, is wrong.

    Args:
        text: The setting, its value and the remedy.

    Raises:
        ConfigError: Unless faults are being collected.
    """
    noted = _noted.get()
    if noted is None:
        raise ConfigError(text)
    noted.append(text)


def any_noted() -> bool:
    """Whether a fault has been noted and not been reported yet."""
    return bool(_noted.get())


@contextmanager
def noting() -> Iterator[None]:
    """An expected error in the block is a fault of its own: what stands behind the block still runs."""
    try:
        yield
    except EXPECTED as error:
        if _noted.get() is None:
            raise
        fault(str(error))


@contextmanager
def collected() -> Iterator[None]:
    """Note the faults in the block and raise them together at its end.

    A block within a block ends the collecting of both: what was noted in either is reported there, and a fault after
    it is raised at once.

    Raises:
        ConfigError: Names every fault. Any other exception in the block gives way to it when something was noted,
            since building went on with a wrong value.
    """
    outer = _noted.get()
    noted: list[str] = [] if outer is None else outer
    _noted.set(noted)
    try:
        yield
    except Exception as error:
        if _noted.get() is None or not noted:
            raise
        if isinstance(error, EXPECTED):
            noted.append(str(error))
        raise ConfigError(told(noted)) from error
    finally:
        _noted.set(None)
    if noted:
        raise ConfigError(told(noted))


def told(faults: list[str]) -> str:
    """The faults as the text of one error, at most ten lines; a single fault is that text itself."""
    different = list(dict.fromkeys(faults))
    if len(different) == 1:
        return different[0]
    lines = [f"  - {' '.join(text.split()):.{LONGEST}}" for text in different[:SHOWN]]
    more = [f"  and {len(different) - SHOWN} more"] if len(different) > SHOWN else []
    return "\n".join([f"{len(different)} things cannot work:", *lines, *more])


def at_least(least: float, where: str, **values: float | None) -> None:
    """A fault for each of these settings of `where` that is below `least` or no number; None passes."""
    for name, value in values.items():
        if value is not None and not value >= least:
            fault(f"{where}.{name} is {value}; it must be at least {least}.")


def above(least: float, where: str, **values: float | None) -> None:
    """A fault for each of these settings of `where` that is not above `least`; None passes."""
    for name, value in values.items():
        if value is not None and not value > least:
            fault(f"{where}.{name} is {value}; it must be above {least}.")


def _say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """`sys.excepthook`: what ends a script is shown here."""
    if getattr(error, "shown_alone", False):
        sys.stderr.write(f"lrl: error: {error}\n")
    else:
        _shown_before(kind, error, traceback)


# Only what nobody catches comes here; a notebook shows the errors of its cells by itself.
_shown_before, sys.excepthook = sys.excepthook, _say
