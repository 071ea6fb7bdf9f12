"""Configuration errors: raised one by one, or collected and reported together.

A constructor that finds a wrong setting calls `fault`. In a script that raises at once. The command
line and the preflight checks open `collected` first: then the fault is only noted, building
continues with the wrong value, and one error at the end names all faults.
"""

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from lrl.errors import ConfigError

EXPECTED = (ValueError, FileNotFoundError)
"""Errors that wrong inputs raise."""
MAX_NAMED_FAULTS = 8
"""Faults named in an error; further ones are counted."""
MAX_FAULT_CHARACTERS = 600
"""Characters of one fault."""

_noted: ContextVar[list[str] | None] = ContextVar("lrl_faults", default=None)


def fault(text: str) -> None:
    """Raises ConfigError with `text` (setting, value, remedy), or notes it while faults are being
    collected."""
    noted = _noted.get()
    if noted is None:
        raise ConfigError(text)
    noted.append(text)


def any_noted() -> bool:
    """Whether there is a fault that is not reported yet."""
    return bool(_noted.get())


@contextmanager
def noting() -> Iterator[None]:
    """Turns an expected error in the block into a fault, so that the code after the block still
    runs."""
    try:
        yield
    except EXPECTED as error:
        if _noted.get() is None:
            raise
        fault(str(error))


@contextmanager
def collected() -> Iterator[None]:
    """Collects the faults in the block and raises them together at its end.

    The end of a nested block ends the collection of the outer one too: it reports the faults of
    both, and a fault after it is raised at once.

    Raises:
        ConfigError: Names every fault. It replaces any other exception in the block if there was a
            fault, since building continued with a wrong value.
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
        raise ConfigError(_joined(noted)) from error
    finally:
        _noted.set(None)
    if noted:
        raise ConfigError(_joined(noted))


def _joined(faults: list[str]) -> str:
    """Returns the text of one error, at most ten lines; a single fault is its own text."""
    different = list(dict.fromkeys(faults))
    if len(different) == 1:
        return different[0]
    lines = [
        f"  - {' '.join(text.split()):.{MAX_FAULT_CHARACTERS}}"
        for text in different[:MAX_NAMED_FAULTS]
    ]
    more = (
        [f"  and {len(different) - MAX_NAMED_FAULTS} more"]
        if len(different) > MAX_NAMED_FAULTS
        else []
    )
    return "\n".join([f"{len(different)} things cannot work:", *lines, *more])


def at_least(least: float, where: str, **values: float | None) -> None:
    """Calls `fault` for each of these settings of `where` that is below `least`, NaN, or no number;
    None passes."""
    for name, value in values.items():
        if value is not None and not _holds(operator.ge, value, least):
            fault(f"{where}.{name} is {value!r}; it must be {_number(value)}at least {least}.")


def above(least: float, where: str, **values: float | None) -> None:
    """Calls `fault` for each of these settings of `where` that is not above `least`, or no number;
    None passes."""
    for name, value in values.items():
        if value is not None and not _holds(operator.gt, value, least):
            fault(f"{where}.{name} is {value!r}; it must be {_number(value)}above {least}.")


def _number(value: object) -> str:
    return "" if isinstance(value, int | float) else "a number, "


def _holds(compare: Callable[[Any, Any], bool], value: object, least: float) -> bool:
    try:
        return compare(value, least)
    except TypeError:  # a script may give text
        return False


def one_of(where: str, **words_and_values: tuple[Sequence[object], object]) -> None:
    """Calls `fault` for each of these settings of `where` that is none of its words.

    The command line knows the words by their types; a script may give any text.
    """
    for name, (words, value) in words_and_values.items():
        if value not in words:
            known = ", ".join(map(str, words))
            fault(f"{where}.{name} is {value!r}; choose from {known}.")


def instances(where: str, **kinds_and_values: tuple[type, object]) -> None:
    """Calls `fault` for each of these settings of `where` that is not of its class; None passes.

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
        return
    _previous_hook(kind, error, traceback)
    if isinstance(error, TypeError):
        from lrl.system import unknown_argument  # 200 names that only an error needs

        if answer := unknown_argument.answer(error):
            sys.stderr.write(f"{answer}\n")


# Only uncaught errors of a script come here; a notebook shows the errors of its cells by itself.
_previous_hook, sys.excepthook = sys.excepthook, _show
