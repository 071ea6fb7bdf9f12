"""A wait for the loop, and the context that a long one enters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lrl.system.event_loop import LoopThread


@pytest.mark.parametrize(("moment_s", "entered"), [(60.0, 0), (0.001, 1)])
def test_only_a_long_wait_enters_the_context_of_long_waits(
    moment_s: float, entered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrl.system.event_loop.MOMENT_S", moment_s)
    seen: list[str] = []

    @contextmanager
    def long_wait() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    loop = LoopThread()
    loop.long_wait = long_wait
    try:
        assert loop.wait(asyncio.sleep(1.0, "done"), 60.0, "this") == "done"
        assert seen == ["in", "out"] * entered
    finally:
        loop.close()
