"""What a run writes beside its checkpoints: logs, responses, pictures. A disk that refuses them does not end the run.

The error is a warning that names file and reason. Anything but an OSError is a fault of the program and goes on up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

log = logging.getLogger(__name__)

_refused: WeakSet[Any] = WeakSet()


def os_error(error: BaseException | None) -> OSError | None:
    """`error`, or the OSError behind it: torch hides one in a RuntimeError, TensorBoardLogger in a ValueError."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def best_effort(what: str, path: Path | str) -> Iterator[None]:
    """A block that writes `what` to `path`; an OSError in it is logged."""
    try:
        yield
    except OSError as error:
        log.warning("%s cannot be written to %s: %s. The run goes on.", what, path, error)


@contextmanager
def may_not_log(logger: Any) -> Iterator[None]:
    """A block that a Lightning logger writes in; the first OSError of each logger is logged."""
    try:
        yield
    except Exception as error:
        if (reason := os_error(error)) is None:
            raise
        if logger not in _refused:
            _refused.add(logger)
            name, place = type(logger).__name__, getattr(logger, "log_dir", None) or logger.save_dir
            log.warning("%s cannot write to %s: %s. The run goes on, with gaps in its log.", name, place, reason)
