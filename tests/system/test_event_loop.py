"""A wait for the loop ends at its deadline, and names what it was for."""

from __future__ import annotations

import asyncio

import pytest

from lrl.system.event_loop import LoopThread


def test_a_wait_ends_at_its_deadline_or_by_an_interrupt_and_its_work_is_cancelled() -> None:
    loop, cancelled = LoopThread(), list[str]()

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.append(name)

    def interrupted() -> None:
        raise KeyboardInterrupt

    try:
        assert loop.wait(asyncio.sleep(0.2, "done"), 60.0, "this") == "done"
        with pytest.raises(TimeoutError, match="the sync did not end within 0.1 s"):
            loop.wait(work("late"), 0.1, "the sync")
        with pytest.raises(KeyboardInterrupt):
            loop.wait(work("interrupted"), 60.0, "the sync", interrupted)
    finally:
        loop.close()
    assert cancelled == ["late", "interrupted"]
