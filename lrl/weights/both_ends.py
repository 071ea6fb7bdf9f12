"""The wait for both ends of a collective transfer, and their abort where they cannot meet."""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

import torch

from lrl.errors import CollectiveBroken, RankLostError
from lrl.weights.communicator import ABORT_ROUTE
from lrl.weights.group_calls import GeneratorGroupCalls, Phase

T = TypeVar("T")

LOOK_S = 0.1
"""Seconds between two looks at the ends."""


def wait_for_both_ends(
    calls: GeneratorGroupCalls,
    phase: Phase,
    own: Future[T],
    name: str,
    abort: Callable[[], None],
) -> T:
    """Waits for both ends of a collective: `phase` in the generators and `own` in the trainer.

    At the first sign that they cannot meet, the trainer's end is aborted, then the others'.
    Generators that failed before, or do not answer afterwards, are at fault.

    Args:
        calls: The generators that take part.
        phase: The calls to them.
        own: The trainer's part.
        name: Of the communicator (`lrl.vllm_plugin.abort_route`).
        abort: Ends the trainer's part.

    Raises:
        CollectiveBroken: A generator failed or was evicted, the trainer's part failed, or
            `deadline_s` passed.
    """
    try:
        _wait(calls, phase, own)
    except Exception:
        calls.exclude_evicted()
        calls.exclude_failed(phase)
        abort()
        # Makes every worker return from the collective.
        route = ABORT_ROUTE + name
        calls.each(route, calls.post_to(route, calls.silence_s), short=True)
        _wait_for_answers(calls, phase)
        raise
    except BaseException:  # a signal: the end of the run ends the generators, too
        abort()
        raise
    calls.exclude_failed(phase)  # those that failed since the last look
    return own.result()


def _wait(calls: GeneratorGroupCalls, phase: Phase, own: Future[Any]) -> None:
    end = time.monotonic() + calls.deadline_s
    while True:
        lost = [
            one.name for one in phase.generators if one in phase.errors or one.eviction is not None
        ]
        if lost:
            raise CollectiveBroken(f"{phase.name} broke off, because {' and '.join(lost)} failed.")
        if own.done():
            _raise_as_broken(own, phase.name)
        if own.done() and phase.ended.done():
            phase.ended.result()
            return
        if time.monotonic() > end:
            raise CollectiveBroken(f"{phase.name} did not end within {calls.deadline_s:g} s.")
        calls.interrupted()
        wait([one for one in (own, phase.ended) if not one.done()], LOOK_S, FIRST_COMPLETED)


def _wait_for_answers(calls: GeneratorGroupCalls, phase: Phase) -> None:
    """Waits until all participants return from an aborted phase; excludes failed and silent
    ones."""
    end = time.monotonic() + calls.silence_s
    while any(one not in phase.answered for one in calls.participants):
        if time.monotonic() >= end:
            break
        calls.interrupted()
        wait([phase.ended], LOOK_S)
    phase.ended.cancel()  # the calls to those that were at fault before
    why = f"{phase.name} was aborted, and it did not return in {calls.silence_s:g} s."
    calls.failed |= {one: why for one in calls.participants if one not in phase.answered}
    calls.exclude_evicted()
    calls.exclude_failed(phase)


def _raise_as_broken(own: Future[Any], what: str) -> None:
    """Raises the error of the trainer's part, if it has one; NCCL's own as CollectiveBroken."""
    error = own.exception()
    if isinstance(error, RuntimeError) and not isinstance(
        error, torch.OutOfMemoryError | RankLostError
    ):
        raise CollectiveBroken(f"{what} broke off in the trainer: {error}") from error
    if error is not None:
        raise error
