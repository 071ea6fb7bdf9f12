"""A call that may never return, on a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
