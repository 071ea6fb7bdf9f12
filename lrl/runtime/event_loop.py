"""The one asyncio loop of a run, on a thread of rank 0, and the one way for the trainer's thread to wait for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")

MOMENT_S = 0.02
"""A wait that takes longer is a long one."""
POLL_S = 0.2
"""How often a waiting trainer looks whether it should stop: a signal must not wait for a rollout."""


class LoopThread:
    """An asyncio loop that runs on its own thread until `close`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.interrupted: Callable[[], None] | None = None
        """Called every fifth of a second of every wait that has no such function of its own; raises to stop it."""
        self.long_wait: Callable[[], AbstractContextManager[None]] = nullcontext
        """What the rest of a long wait happens in."""
        self._thread = threading.Thread(target=self.loop.run_forever, name="lrl-loop", daemon=True)
        self._thread.start()

    @property
    def thread(self) -> int:
        """The system's own number of the thread."""
        assert self._thread.native_id is not None, "it was started"
        return self._thread.native_id

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.loop.is_closed()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop; the future has its result or its exception."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(
        self,
        work: Coroutine[Any, Any, T],
        deadline_s: float,
        what: str,
        interrupted: Callable[[], None] | None = None,
    ) -> T:
        """Run `work` on the loop and wait for it, from another thread.

        Args:
            work: What to run.
            deadline_s: Seconds after which it is cancelled.
            what: Named in the error.
            interrupted: Called every fifth of a second; it raises to stop the wait.

        Raises:
            TimeoutError: `work` took longer than `deadline_s`.
        """
        return self.wait_for(self.submit(work), deadline_s, what, interrupted)

    def wait_for(
        self,
        future: concurrent.futures.Future[T],
        deadline_s: float,
        what: str,
        interrupted: Callable[[], None] | None = None,
    ) -> T:
        """Wait for what `submit` started; see `wait`."""
        end = time.monotonic() + deadline_s
        try:
            soon = concurrent.futures.wait([future], min(MOMENT_S, deadline_s)).done
            with nullcontext() if soon else self.long_wait():
                while not concurrent.futures.wait([future], min(POLL_S, max(0.0, end - time.monotonic()))).done:
                    if time.monotonic() >= end:
                        raise TimeoutError(f"{what} did not end within {deadline_s:g} s.")
                    if interrupted := interrupted or self.interrupted:
                        interrupted()
                return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread; idempotent."""
        if self.closed:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result(timeout=10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        self.loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
