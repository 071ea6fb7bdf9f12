"""Calls of the trainer's thread into the controller."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lrl.rollouts.controller_calls import ControllerCalls
from lrl.system.event_loop import LoopThread
from lrl.types import Rollout


class WritingController:
    """A controller with one rollout that is written without end."""

    def __init__(self) -> None:
        self.rollout = Rollout()

    async def write(self) -> None:
        """Each token takes a while to be written whole."""
        while True:
            self.rollout.token_ids.append(1)
            time.sleep(0.001)
            self.rollout.logprobs.append(-1.0)
            await asyncio.sleep(0)

    async def next_group(self, step: int) -> None:
        await asyncio.sleep(60)

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        return {"lengths": (len(self.rollout.token_ids), len(self.rollout.logprobs))}


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


def calls_of(loop: LoopThread, group_deadline_s: float = 60.0, poll: Any = None) -> ControllerCalls:
    controller: Any = WritingController()
    return ControllerCalls(controller, loop, group_deadline_s=group_deadline_s, poll=poll)


def test_a_read_on_the_loop_sees_no_half_written_rollout(loop: LoopThread) -> None:
    calls: Any = calls_of(loop)
    loop.submit(calls.controller.write())
    read = [calls.state_dict(0)["lengths"] for _ in range(30)]
    assert all(tokens == logprobs for tokens, logprobs in read) and read[-1] > read[0]
    loop.close()
    # After the loop's end, too.
    assert calls.state_dict(0)["lengths"] >= read[-1]


def test_a_wait_for_a_group_is_polled_and_has_a_deadline_that_names_the_step(
    loop: LoopThread,
) -> None:
    polled: list[None] = []
    calls = calls_of(loop, group_deadline_s=0.3, poll=lambda: polled.append(None))
    with pytest.raises(TimeoutError, match=r"waiting for a finished group for step 7 did not end"):
        calls.next_group(7)
    assert polled


def test_a_run_that_was_stopped_says_so_between_two_rounds(loop: LoopThread) -> None:
    calls = calls_of(loop)
    calls.raise_if_stopped()  # nobody has

    def stopped() -> None:
        raise KeyboardInterrupt

    loop.interrupted = stopped
    with pytest.raises(KeyboardInterrupt):
        calls.raise_if_stopped()
