"""The errors of lrl, one tree (`except lrl.LrlError` catches all that lrl raises by itself), and the
checks of settings. Errors that never leave the file that raises them stand there.
"""

import re
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar, cast

Constructor = TypeVar("Constructor", bound=Callable[..., None])

EXPECTED = (ValueError, FileNotFoundError)
"""Errors that wrong inputs raise."""


class LrlError(Exception):
    """Base of all errors that lrl raises itself."""


class ConfigError(LrlError, ValueError):
    """A wrong setting, or a wrong input that a setting names: the message gives name, value and
    remedy."""


class RewardFailuresError(LrlError, ValueError):
    """So many responses got no reward that the run cannot continue."""


class ServerError(LrlError, RuntimeError):
    """A failed start; the message has the exit status, the cause found in the log, and the log's
    path."""


class GeneratorError(LrlError, RuntimeError):
    """A failed call; the message names the generator and the route, and quotes the response."""


class RequestRejected(GeneratorError):
    """HTTP 4xx: the request itself is wrong, so another generator would reject it too."""


class GeneratorTimeout(GeneratorError):
    """No complete response before the deadline of the request."""


class NoGenerators(LrlError, RuntimeError):
    """An outage of all generators that was longer than its limit."""


class RankLostError(LrlError, RuntimeError):
    """Another rank has ended, or did not answer in time."""


class RendezvousError(LrlError, RuntimeError):
    """The ranks did not meet; the message names the missing ranks, or the ended ones with their
    reasons."""


class CollectiveBroken(LrlError, RuntimeError):
    """A collective transfer failed for one generator, so no generator has the weights."""


class StuckTransfer(LrlError, RuntimeError):
    """A broadcast that an abort did not end: the run cannot go on."""


class FetchFailed(LrlError, RuntimeError):
    """A file that could not be fetched; the message has the reason of each attempt."""


class BadTransfer(LrlError, RuntimeError):
    """A response that is not the file, or not all of it; or a delta that does not lead to it."""


class NotRunning(LrlError, RuntimeError):
    """A run or generator that does not exist or does not answer; the message has the remedy."""


class NoAnswer(NotRunning):
    """A run that does not answer now."""


class BadAnswer(LrlError, RuntimeError):
    """An answer that no member of its kind gives."""


class CountedError(LrlError, RuntimeError):
    """A response without a reward, through no fault of the policy; it is counted by its kind.

    Args:
        kind: One of the kinds in `lrl.rewards.pool`.
        message: What has happened.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class CallFailed(CountedError):
    """A call at which a worker has failed, or has ended through its fault.

    Args:
        kind: `exception`, `timeout`, `crash` or `memory`.
        message: What has happened.
        item: The response of a group whose code ran; None if that is not known.
    """

    def __init__(self, kind: str, message: str, item: int | None = None) -> None:
        super().__init__(kind, message)
        self.item = item


class EpisodeError(CountedError):
    """An episode that has failed; its kind is one of `EPISODE_KINDS`."""


class TeacherError(CountedError):
    """Log-probs that the server of a teacher has not given; the message names its address. Its kind
    is `teacher_refused` (it would refuse again) or `teacher_failed` (no answer in time)."""


class NoEnvironments(LrlError, RuntimeError):
    """An outage of all environments that was longer than its limit."""


class WorkerLost(LrlError, RuntimeError):
    """A worker, or the machine that it is on, is lost; others can do what it was asked.

    Args:
        message: Why.
        by_other: Whether another job has ended it, which then has failed.
    """

    def __init__(self, message: str, *, by_other: bool = False) -> None:
        super().__init__(message)
        self.by_other = by_other


class WorkersClosed(WorkerLost):
    """Workers that were not started, or were ended with the run."""


class UntrustedFile(LrlError, PermissionError):
    """A file that another user owns or can access, or with wrong content; the message names the
    remedy."""


class ExportError(LrlError, OSError):
    """A trained policy that no folder could take; the message has the folders and the remedy."""


SHOWN_ALONE = (ConfigError, ServerError, RankLostError, RendezvousError, TeacherError, ExportError)
"""Their messages need no traceback: a script that they end shows the message alone."""


# ---- checks of the settings of `where`, given by name: ConfigError for the first wrong one


def at_least(least: float, where: str, **values: float | None) -> None:
    """Refuses a setting below `least` or NaN; None passes."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ConfigError(f"{where}.{name} is {value!r}; it must be at least {least}.")


def above(least: float, where: str, **values: float | None) -> None:
    """Refuses a setting that is not above `least`; None passes."""
    for name, value in values.items():
        if value is not None and not value > least:
            raise ConfigError(f"{where}.{name} is {value!r}; it must be above {least}.")


def one_of(where: str, **words_and_values: tuple[Sequence[object], object]) -> None:
    """Refuses a setting that is none of its words: the command line knows them by their types, a
    script may give any text."""
    for name, (words, value) in words_and_values.items():
        if value not in words:
            known = ", ".join(map(str, words))
            raise ConfigError(f"{where}.{name} is {value!r}; choose from {known}.")


def instances(where: str, **kinds_and_values: tuple[type, object]) -> None:
    """Refuses a setting that is not of its class, such as the class itself or its name, of which
    the command line makes an object and a script does not; None passes."""
    for name, (kind, value) in kinds_and_values.items():
        if isinstance(value, type):
            raise ConfigError(f"{where}.{name} is {value!r}; give {value.__name__}().")
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{where}.{name} is {value!r}; give an object of the class {kind.__name__}."
            )


def answers_aliases(constructor: Constructor) -> Constructor:
    """Adds to a constructor's TypeError what lrl calls the unknown argument, for scripts and
    notebooks."""

    @wraps(constructor)
    def answering(*args: Any, **settings: Any) -> None:
        try:
            constructor(*args, **settings)
        except TypeError as error:
            from lrl import aliases  # here: a run needs none

            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown and (answer := aliases.setting(unknown[1])):
                error.add_note(answer)
            raise

    return cast(Constructor, answering)


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, SHOWN_ALONE):
        sys.stderr.write(f"lrl: error: {error}\n")
    else:
        _previous_hook(kind, error, traceback)


# Only uncaught errors of a script come here; a notebook shows the errors of its cells by itself.
_previous_hook, sys.excepthook = sys.excepthook, _show
