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


def at_least(least: float, where: str, **values: float | None) -> None:
    """Raises ConfigError for the first of these settings of `where` that is below `least` or NaN;
    None passes."""
    for name, value in values.items():
        if value is not None and not value >= least:
            fault(f"{where}.{name} is {value!r}; it must be at least {least}.")


def above(least: float, where: str, **values: float | None) -> None:
    """Raises ConfigError for the first of these settings of `where` that is not above `least`; None
    passes."""
    for name, value in values.items():
        if value is not None and not value > least:
            fault(f"{where}.{name} is {value!r}; it must be above {least}.")


def one_of(where: str, **words_and_values: tuple[Sequence[object], object]) -> None:
    """Raises ConfigError for the first of these settings of `where` that is none of its words.

    The command line knows the words by their types; a script may give any text.
    """
    for name, (words, value) in words_and_values.items():
        if value not in words:
            known = ", ".join(map(str, words))
            fault(f"{where}.{name} is {value!r}; choose from {known}.")


def instances(where: str, **kinds_and_values: tuple[type, object]) -> None:
    """Raises ConfigError for the first of these settings of `where` that is not of its class; None passes.

    A script may give a class, or its name, in the place of an object: the command line makes one of
    either.
    """
    for name, (kind, value) in kinds_and_values.items():
        if value is None or isinstance(value, kind):
            continue
        example = (
            f"{value.__name__}()"
            if isinstance(value, type)
            else f"an object of the class {kind.__name__}"
        )
        fault(f"{where}.{name} is {value!r}; give {example}.")


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if getattr(error, "shown_alone", False):
        sys.stderr.write(f"lrl: error: {error}\n")
    else:
        _previous_hook(kind, error, traceback)


# Only uncaught errors of a script come here; a notebook shows the errors of its cells by itself.
_previous_hook, sys.excepthook = sys.excepthook, _show
