"""Fixtures of the tests of syncs."""

from collections.abc import Iterator

import pytest

from lrl.system.event_loop import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    """A running loop."""
    thread = LoopThread()
    yield thread
    thread.close()
