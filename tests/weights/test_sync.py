"""Syncs in which each phase goes wrong for one of two generators."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator

import pytest
import torch

from lrl.generators.generator import Generator
from lrl.generators.loop import LoopThread
from lrl.weights import Control
from lrl.weights.sync import Sync
from tests.weights.model_sync import Collective, Direct, make_generators, weights

PHASES = [
    "/pause?mode=keep",
    "/is_paused",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/weight_info",
]


AGAIN = [*PHASES[:2], "/finish_weight_update", *PHASES[2:]]
"""Of another attempt, when the one before may have left an update open: it is closed first."""


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


class Proving:
    """Opens who holds the weights, and keeps who does not; stands for `Crew.prove`."""

    def __init__(self, loop: LoopThread) -> None:
        self.loop = loop
        self.failed: dict[Generator, str] = {}

    def __call__(self, resumed: list[Generator]) -> None:
        for generator in resumed:
            if generator.client.holds == zlib.crc32(torch.ones(3).numpy()):  # type: ignore[attr-defined]
                self.loop.loop.call_soon_threadsafe(generator.prove)
            else:
                self.failed[generator] = "it does not compute what the policy computes"
        self.loop.wait(asyncio.sleep(0), 1.0, "opening")


@pytest.fixture
def prove(loop: LoopThread) -> Proving:
    return Proving(loop)


def make_sync(loop: LoopThread, kind: type[Direct] = Direct) -> tuple[Sync, list[Generator]]:
    return Sync(Control(loop, 5.0, 5.0), kind, "run-0"), make_generators()


def posted(generator: Generator) -> list[str]:
    return generator.client.posted  # type: ignore[attr-defined,no-any-return]


def test_a_sync_pauses_updates_and_resumes_and_only_the_proof_opens(loop: LoopThread, prove: Proving) -> None:
    sync, generators = make_sync(loop)
    assert sync.move(weights, generators, 3, prove) == {}
    for generator in generators:
        assert posted(generator) == ["/init_weight_transfer_engine", *PHASES, "/resume"]
        assert generator.open and generator.version == 3
    assert sync.pause_seconds > 0


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("times", [1, 2])
def test_a_phase_that_fails_is_tried_again_and_nobody_writes_before_it_worked(
    loop: LoopThread, phase: str, times: int, prove: Proving
) -> None:
    sync, (healthy, failing) = make_sync(loop)
    failing.client.failing = {phase: times}  # type: ignore[attr-defined]
    assert sync.move(weights, [healthy, failing], 3, prove) == {}
    assert posted(failing).count("/resume") == posted(healthy).count("/resume") == 1
    assert posted(failing).count(PHASES[0]) == times + 1
    opened = phase in PHASES[2:5]
    assert posted(failing)[-8:] == ([*AGAIN, "/resume"] if opened else [phase, *PHASES, "/resume"])
    assert posted(healthy) == [
        "/init_weight_transfer_engine",
        *PHASES,
        "/resume",
    ]  # the other's failure costs it nothing
    assert sync._transport.staged == [False, False, True][: times + 1]  # type: ignore[attr-defined]
    assert failing.open and failing.version == 3


@pytest.mark.parametrize("phase", ["/init_weight_transfer_engine", *PHASES, "/resume"])
def test_who_fails_every_attempt_is_named_with_phase_and_seconds_and_never_opens(
    loop: LoopThread, phase: str, prove: Proving
) -> None:
    sync, (healthy, failing) = make_sync(loop)
    failing.client.failing = {phase: 100}  # type: ignore[attr-defined]
    failed = sync.move(weights, [healthy, failing], 3, prove)
    assert list(failed) == [failing]
    assert phase.split("?")[0] in failed[failing] and "version 3 failed after" in failed[failing]
    assert healthy.open and not failing.open
    if phase != "/resume":
        assert "/resume" not in posted(failing)


@pytest.mark.parametrize("phase", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_call_that_was_done_and_looked_like_a_failure_does_not_stand_in_the_way_of_the_next_attempt(
    loop: LoopThread, phase: str, prove: Proving
) -> None:
    sync, (healthy, unheard) = make_sync(loop)
    unheard.client.unanswered = {phase}  # type: ignore[attr-defined]
    assert sync.move(weights, [healthy, unheard], 3, prove) == {}
    assert posted(unheard)[-8:] == [*AGAIN, "/resume"] and posted(unheard).count(PHASES[0]) == 2
    assert unheard.open and healthy.open


@pytest.mark.parametrize("phase", ["/pause?mode=keep", "/is_paused", "/weight_info"])
def test_who_does_not_answer_a_short_call_stands_still_and_is_not_asked_again(
    loop: LoopThread, phase: str, prove: Proving
) -> None:
    sync, (healthy, frozen) = make_sync(loop)
    frozen.client.silent = {phase}  # type: ignore[attr-defined]
    failed = sync.move(weights, [healthy, frozen], 3, prove)
    assert list(failed) == [frozen] and phase.split("?")[0] in failed[frozen]
    assert posted(frozen).count(phase) == 1 and not frozen.open
    assert posted(healthy).count("/resume") == 1 and healthy.open


def test_a_short_call_has_at_most_the_deadline_of_a_phase(loop: LoopThread) -> None:
    assert Control(loop, 10.0, 60.0).silence_s == 10.0
    assert Control(loop, 300.0, 60.0).silence_s == 60.0


@pytest.mark.parametrize("times", [1, 2])
def test_a_connection_that_fails_is_made_again(loop: LoopThread, times: int, prove: Proving) -> None:
    sync, (healthy, failing) = make_sync(loop)
    failing.client.failing = {"/init_weight_transfer_engine": times}  # type: ignore[attr-defined]
    assert sync.move(weights, [healthy, failing], 3, prove) == {}
    assert posted(failing) == ["/init_weight_transfer_engine"] * (times + 1) + [*PHASES, "/resume"]
    assert posted(healthy) == ["/init_weight_transfer_engine", *PHASES, "/resume"]
    assert failing.open and failing.version == 3


@pytest.mark.parametrize("phase", ["/pause?mode=keep", "/update_weights", "/finish_weight_update"])
def test_a_call_that_came_back_without_being_done_is_noticed(loop: LoopThread, phase: str, prove: Proving) -> None:
    sync, (healthy, liar) = make_sync(loop)
    liar.client.lying = {phase}  # type: ignore[attr-defined]
    failed = sync.move(weights, [healthy, liar], 3, prove) | prove.failed
    assert list(failed) == [liar] and not liar.open and healthy.open
    if phase == "/pause?mode=keep":
        assert "/update_weights" not in posted(liar)


def test_without_room_for_the_weights_the_other_way_is_taken(loop: LoopThread, prove: Proving) -> None:
    sync, generators = make_sync(loop)
    sync._transport.full = True  # type: ignore[attr-defined]
    assert sync.move(weights, generators, 3, prove) == {}
    assert sync._transport.staged == [False, False, True]  # type: ignore[attr-defined]
    assert all(posted(generator).count("/pause?mode=keep") == 1 for generator in generators)


def test_a_newcomer_connects_and_the_others_do_not_again(loop: LoopThread, prove: Proving) -> None:
    sync, (first, newcomer) = make_sync(loop)
    sync.move(weights, [first], 1, prove)
    sync.move(weights, [newcomer], 1, prove)
    sync.move(weights, [first, newcomer], 2, prove)
    assert posted(first).count("/init_weight_transfer_engine") == 1
    assert posted(newcomer)[0] == "/init_weight_transfer_engine" and newcomer.open
    assert posted(newcomer).count("/init_weight_transfer_engine") == 1


def test_a_collective_transfer_connects_everybody_anew_when_one_is_new(loop: LoopThread, prove: Proving) -> None:
    sync, (first, newcomer) = make_sync(loop, Collective)
    sync.move(weights, [first], 1, prove)
    before = sync._transport
    sync.move(weights, [first, newcomer], 2, prove)
    assert before.closed == 1 and sync._transport is not before  # type: ignore[attr-defined]
    assert posted(first).count("/init_weight_transfer_engine") == 2 and first.open and newcomer.open


def test_a_collective_transfer_connects_everybody_anew_when_one_has_left(loop: LoopThread, prove: Proving) -> None:
    sync, (first, leaver) = make_sync(loop, Collective)
    sync.move(weights, [first, leaver], 1, prove)
    assert sync.move(weights, [first], 2, prove) == {}
    assert posted(first).count("/init_weight_transfer_engine") == 2 and first.open and first.version == 2
    sync.move(weights, [first], 3, prove)
    assert posted(first).count("/init_weight_transfer_engine") == 2


def test_a_broken_collective_gives_up_everybody_at_once(loop: LoopThread, prove: Proving) -> None:
    sync, generators = make_sync(loop, Collective)
    generators[1].client.failing = {"/update_weights": 1}  # type: ignore[attr-defined]
    failed = sync.move(weights, generators, 3, prove)
    assert set(failed) == set(generators) and not any(generator.open for generator in generators)
    assert "/resume" not in posted(generators[0])
