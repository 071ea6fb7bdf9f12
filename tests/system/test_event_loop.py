"""A wait for the loop, and the context that a long one enters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lrl.system.event_loop import LoopThread


def test_only_a_long_wait_enters_the_context_of_long_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    @contextmanager
    def long_wait() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    loop = LoopThread()
    loop.long_wait = long_wait
    try:
        for moment_s, entered in ((60.0, []), (0.001, ["in", "out"])):
            monkeypatch.setattr("lrl.system.event_loop.MOMENT_S", moment_s)
            assert loop.wait(asyncio.sleep(0.2, "done"), 60.0, "this") == "done"
            assert seen == entered
    finally:
        loop.close()
