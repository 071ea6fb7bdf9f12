"""Work on other threads: the asyncio loop of a run, waits for it, and calls that may not return."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from typing import Any, TypeVar

T = TypeVar("T")
Interrupted = Callable[[], None] | None
"""Called every `POLL_S` seconds of a wait; raises to stop it."""

POLL_S = 0.2
"""Seconds between two calls of `interrupted`: a signal must not wait for a rollout."""


class LoopThread:
    """An asyncio loop on a thread of that name, until `close`."""

    def __init__(self, name: str = "lrl-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self.interrupted: Interrupted = None
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self.loop.is_closed()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts `work` on the loop; the future has its result or its exception."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(
        self,
        work: Coroutine[Any, Any, T] | Future[T],
        deadline_s: float,
        purpose: str,
        interrupted: Interrupted = None,
    ) -> T:
        """Waits, on another thread, for work on the loop: a coroutine, or the future of a `submit`.
        After `deadline_s` seconds it is cancelled, and TimeoutError names the purpose.

        `interrupted` is by default the attribute of that name.
        """
        future = work if isinstance(work, Future) else self.submit(work)
        end = time.monotonic() + deadline_s
        try:
            while not wait_futures([future], min(POLL_S, max(0, end - time.monotonic()))).done:
                if time.monotonic() >= end:
                    raise TimeoutError(f"{purpose} did not end within {deadline_s:g} s.")
                if interrupted := interrupted or self.interrupted:
                    interrupted()
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancels all running work and ends the thread; idempotent."""
        if not self.closed:
            self.submit(cancel_all()).result(timeout=10)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=10)
            self.loop.close()


def run_apart(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine to its end on a thread of its own: this thread may have a loop, as in a
    notebook."""
    return start_daemon_call(lambda: asyncio.run(work()), "lrl-apart").result()


def start_daemon_call(work: Callable[[], T], name: str) -> Future[T]:
    """Runs `work` on a daemon thread and returns its future.

    Not on a `ThreadPoolExecutor`: Python joins the threads of one at its end, and would wait for
    ever with them.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # whoever asks for the result raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def together(works: Iterable[Awaitable[None]]) -> None:
    """Does all at once; the first error, or the end of this task, ends the others. Cancelling one of
    them is not an error."""
    tasks = list(map(asyncio.ensure_future, works))
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_all() -> None:
    """Cancels all other work of the running loop, and waits for its end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
