"""Best-effort writes: logs, responses and pictures next to the checkpoints. A full disk costs a
warning, not the run, and a text that is no UTF-8 an escape.

Only an OSError is caught: any other error is a fault of the program.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

log = logging.getLogger(__name__)

_warned: WeakSet[Any] = WeakSet()


def os_error(error: BaseException | None) -> OSError | None:
    """Returns `error` or the OSError that caused it: torch and TensorBoardLogger raise other errors
    from one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def best_effort(subject: str, path: Path | str) -> Iterator[None]:
    """Logs an OSError of a block that writes `subject` to `path`."""
    try:
        yield
    except OSError as error:
        log.warning("%s cannot be written to %s: %s. The run continues.", subject, path, error)


@contextmanager
def may_not_log(logger: Any) -> Iterator[None]:
    """Suppresses the OSErrors of a Lightning logger in the block; logs only the first of each
    logger."""
    try:
        yield
    except Exception as error:
        if (reason := os_error(error)) is None:
            raise
        if logger not in _warned:
            _warned.add(logger)
            folder = getattr(logger, "log_dir", None) or logger.save_dir
            text = "%s cannot write to %s: %s. The run continues, with gaps in its log."
            log.warning(text, type(logger).__name__, folder, reason)


def writable(text: str) -> str:
    """Returns a text that UTF-8 can encode: half of a surrogate pair, as JSON and the messages of
    errors may have, becomes its escape, such as `\\ud83d`."""
    return text.encode(errors="backslashreplace").decode()
