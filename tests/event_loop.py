"""The event loop that asks the workers of tests, like that of a run."""

from collections.abc import Coroutine
from typing import Any

from lrl.system.event_loop import LoopThread

LOOP = LoopThread()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return LOOP.wait(work, 120.0, "the test")
