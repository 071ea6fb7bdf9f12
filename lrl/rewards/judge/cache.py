"""Answers of judges on disk, and the count of the requests that they have cost.

Many processes use a folder at once, also those of later runs. A file appears whole or not at all.
"""

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lrl.errors import JudgeError
from lrl.system.best_effort import best_effort

log = logging.getLogger(__name__)

CALLS = "calls"
"""Name of the file whose bytes are counted: one for each request. A byte is appended whole, so a
process that is killed cannot damage the count."""
LONGEST_HOLD_S = 10.0
_POLL_S = 0.01


class Answer(NamedTuple):
    """The answer of a model."""

    text: str
    finish_reason: str
    """`stop`, or `length` if it was cut."""


@dataclass
class JudgeCache:
    """A folder of answers, each under a hash of all that decides it.

    Args:
        folder: The folder; it is made if it is not there.
        max_calls: Requests that may be sent, over processes and runs; None for no limit.
    """

    folder: Path
    max_calls: int | None

    def __post_init__(self) -> None:
        self.folder = self.folder.expanduser().absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / CALLS).touch()

    def read(self, request: dict[str, Any]) -> Answer | None:
        """Returns the answer to a request; None if there is none, or its file is damaged."""
        file = self._file(request)
        try:
            match json.loads(file.read_text()):
                case {"text": str(text), "finish_reason": str(reason)}:
                    return Answer(text, reason)
        except FileNotFoundError:
            return None
        except (ValueError, OSError):
            pass
        log.warning("%s is damaged: the judge is asked again.", file)
        return None

    def write(self, request: dict[str, Any], answer: Answer) -> None:
        """Writes the answer to a request, or replaces it; only logs that it cannot: the answer has
        its score."""
        file = self._file(request)
        with best_effort("An answer of the judge", file):
            file.parent.mkdir(exist_ok=True)
            draft = file.with_name(f".{secrets.token_hex(8)}")
            draft.write_text(json.dumps(answer._asdict()))
            draft.rename(file)

    async def count(self) -> None:
        """Counts one more request.

        Raises:
            JudgeError: Of kind `judge_budget`: all requests are used, or the folder is not that of
                the process that has made the reward. Of kind `judge_failed`: another process holds
                the count.
        """
        try:
            # Not made here: on a machine with another folder it would begin at 0.
            file = os.open(self.folder / CALLS, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError as error:
            raise JudgeError(
                "judge_budget",
                f"{error}: Judge.cache must be a folder that all machines with reward workers "
                "share, and stay in a run",
            ) from error
        try:
            await _lock(file)
            if self.max_calls is not None and os.fstat(file).st_size >= self.max_calls:
                raise JudgeError(
                    "judge_budget",
                    f"Judge.max_calls is {self.max_calls}, and so many requests are made (counted "
                    f"in {self.folder / CALLS})",
                )
            os.write(file, b".")
        finally:
            os.close(file)  # and with it the lock

    def _file(self, request: dict[str, Any]) -> Path:
        text = json.dumps(request, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        # A folder for each first two letters: a run may have millions.
        return self.folder / name[:2] / f"{name}.json"


async def _lock(file: int) -> None:
    """Locks a file. Others hold it for the moment of a write, or are stopped."""
    try:
        async with asyncio.timeout(LONGEST_HOLD_S):
            while True:
                try:
                    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise JudgeError(
            "judge_failed", f"another process holds the file {CALLS} of Judge.cache"
        ) from None
