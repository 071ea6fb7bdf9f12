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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lrl.errors import ConfigError, JudgeError
from lrl.rewards.chat_endpoint import Answer
from lrl.system.best_effort import best_effort

log = logging.getLogger(__name__)

CALLS = "calls"
"""Name of the file whose bytes are counted: one for each request. A byte is appended whole, so a
process that is killed cannot damage the count."""
_POLL_S = 0.01


class JudgeCache:
    """A folder of answers, each under a hash of all that decides it.

    Args:
        folder: The folder; it is made if it is not there.

    Raises:
        ConfigError: There can be no such folder, or this user cannot write there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / CALLS).touch()
        except OSError as error:
            raise ConfigError(
                f"Judge.cache is {str(folder)!r}: {error.strerror}; give a folder in which this "
                "user can write."
            ) from error

    def read(self, request: dict[str, Any]) -> Answer | None:
        """Returns the answer to a request; None if there is none, or its file is damaged."""
        file = self._file(request)
        try:
            found = json.loads(file.read_text())
            answer = Answer(found["text"], found["finish_reason"])
            if not all(isinstance(field, str) for field in answer):
                raise TypeError("its fields are no texts")
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError, OSError) as error:
            log.warning("%s is damaged (%s): the judge is asked again.", file, error)
            return None
        return answer

    def write(self, request: dict[str, Any], answer: Answer) -> None:
        """Writes the answer to a request, or replaces it; only logs that it cannot: the answer has
        its score."""
        file = self._file(request)
        with best_effort("An answer of the judge", file):
            file.parent.mkdir(exist_ok=True)
            draft = file.with_name(f".{secrets.token_hex(8)}")
            draft.write_text(json.dumps(answer._asdict()))
            draft.rename(file)

    def _file(self, request: dict[str, Any]) -> Path:
        text = json.dumps(request, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        # A folder for each first two letters: a run may have millions.
        return self.folder / name[:2] / f"{name}.json"


class CallBudget:
    """Counts requests in the folder of a cache, over processes and runs.

    Args:
        folder: The folder of a `JudgeCache`.
        max_calls: Requests that may be sent; None for no limit.
    """

    def __init__(self, folder: Path, max_calls: int | None) -> None:
        self.folder = folder
        self.max_calls = max_calls

    async def take(self, until: float) -> None:
        """Counts one more request.

        Args:
            until: Time on the loop's clock at which other processes must have let the file go.

        Raises:
            JudgeError: Of kind `judge_budget`: all requests are used, or the folder is not that of
                the process that has made the reward. Of kind `judge_failed` at the time `until`.
        """
        with self._opened() as file:
            await _lock(file, until)
            if self.max_calls is not None and os.fstat(file).st_size >= self.max_calls:
                raise JudgeError(
                    "judge_budget",
                    f"Judge.max_calls is {self.max_calls}, and so many requests are made (counted "
                    f"in {self.folder / CALLS})",
                )
            os.write(file, b".")

    @contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            # Not made here: on a machine with another folder it would begin at 0.
            file = os.open(self.folder / CALLS, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            raise JudgeError(
                "judge_budget",
                f"{self.folder / CALLS}, which counts the requests, is not there: Judge.cache must "
                "be a folder that all machines with reward workers share, and stay in a run",
            ) from None
        try:
            yield file
        finally:
            os.close(file)  # and with it the lock


async def _lock(file: int, until: float) -> None:
    """Locks a file. Others hold it for the moment of a write, or are stopped."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if loop.time() >= until:
                raise JudgeError(
                    "judge_failed", f"another process holds the file {CALLS} of Judge.cache"
                ) from None
            await asyncio.sleep(_POLL_S)
