"""Errors of wrong settings, which their classes' constructors raise."""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

from lrl.errors import ConfigError

EXPECTED = (ValueError, FileNotFoundError)
"""Errors that wrong inputs raise."""


def fault(text: str) -> NoReturn:
    """Raises ConfigError with `text`: setting, value, remedy."""
    raise ConfigError(text)


# The checks of settings below take the settings of `where` by name, and raise ConfigError for the
# first wrong one.


def at_least(least: float, where: str, **values: float | None) -> None:
    """Refuses a setting below `least` or NaN; None passes."""
    for name, value in values.items():
        if value is not None and not value >= least:
            fault(f"{where}.{name} is {value!r}; it must be at least {least}.")


def above(least: float, where: str, **values: float | None) -> None:
    """Refuses a setting that is not above `least`; None passes."""
    for name, value in values.items():
        if value is not None and not value > least:
            fault(f"{where}.{name} is {value!r}; it must be above {least}.")


def one_of(where: str, **words_and_values: tuple[Sequence[object], object]) -> None:
    """Refuses a setting that is none of its words: the command line knows them by their types, a
    script may give any text."""
    for name, (words, value) in words_and_values.items():
        if value not in words:
            known = ", ".join(map(str, words))
            fault(f"{where}.{name} is {value!r}; choose from {known}.")


def instances(where: str, **kinds_and_values: tuple[type, object]) -> None:
    """Refuses a setting that is not of its class, such as the class itself or its name, of which
    the command line makes an object and a script does not; None passes."""
    for name, (kind, value) in kinds_and_values.items():
        if isinstance(value, type):
            fault(f"{where}.{name} is {value!r}; give {value.__name__}().")
        if value is not None and not isinstance(value, kind):
            fault(f"{where}.{name} is {value!r}; give an object of the class {kind.__name__}.")


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if getattr(error, "shown_alone", False):
        sys.stderr.write(f"lrl: error: {error}\n")
    else:
        _previous_hook(kind, error, traceback)


# Only uncaught errors of a script come here; a notebook shows the errors of its cells by itself.
_previous_hook, sys.excepthook = sys.excepthook, _show
