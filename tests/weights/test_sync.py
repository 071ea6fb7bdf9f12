"""Syncs in which each phase goes wrong for one of two generators."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrl.generators.client import GeneratorError, TooLate
from lrl.generators.generator import Generator
from lrl.generators.loop import LoopThread
from lrl.weights import Control, Transport, Weights
from lrl.weights.sync import Sync

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


class Client:
    """The routes of a generator, each of which may be told to fail so many times.

    As in vLLM an update is open until it is finished, and meanwhile no other can be started.
    """

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.failing: dict[str, int] = {}
        self.lying: set[str] = set()
        self.silent: set[str] = set()
        self.unanswered: set[str] = set()
        """Done once, and reported as failed."""
        self.holds: Any = None
        self.updating = False
        self.state = {"/is_paused": {"is_paused": False}, "/weight_info": {"weight_version": "default"}}

    async def post(self, route: str, body: Any = None, *, deadline_s: float) -> None:
        self.posted.append(route)
        await asyncio.sleep(0)
        if self.failing.get(route, 0) > 0:
            self.failing[route] -= 1
            raise GeneratorError(f"{route} answered 500: no")
        if route in self.silent:
            raise TooLate(f"{route} did not answer within {deadline_s} s.")
        if route in self.lying:
            return
        self._update(route)
        if route == "/update_weights":
            self.holds = body["update_info"]["value"]
        if route == "/finish_weight_update":
            self.state["/weight_info"] = {"weight_version": body["weight_version"]}
        if route in ("/pause?mode=keep", "/resume"):
            self.state["/is_paused"] = {"is_paused": route != "/resume"}

        if route in self.unanswered:
            self.unanswered.remove(route)
            raise GeneratorError(f"{route} failed: the connection was cut")

    def _update(self, route: str) -> None:
        if route == "/start_weight_update":
            if self.updating:
                raise GeneratorError(f"{route} answered 500: a weight update is already active")
            self.updating = True
        elif route in ("/update_weights", "/finish_weight_update") and not self.updating:
            raise GeneratorError(f"{route} answered 500: no weight update is active")
        elif route == "/finish_weight_update":
            self.updating = False

    async def get(self, route: str, *, deadline_s: float) -> Any:
        await self.post(route, deadline_s=deadline_s)
        return self.state[route]


class Direct(Transport):
    """Sends one number; keeps by which way."""

    backend = "direct"
    ways = (False, False, True)

    def __init__(self) -> None:
        self.staged: list[bool] = []
        self.full = False
        self.closed = 0
        self.value = 0

    def connect(self, control: Control, weights: Weights, name: str) -> None:
        control.init_weight_transfer_engine({})

    def stage(self, weights: Weights, second_best: bool) -> None:
        self.staged.append(second_best)
        if self.full and not second_best:
            raise OSError("/dev/shm has 0.00 GiB free")
        ((_, tensor),) = weights()
        self.value = zlib.crc32(tensor.numpy())

    def send(self, control: Control) -> None:
        control.start_weight_update()
        control.update_weights({"value": self.value})
        control.finish_weight_update()

    def close(self) -> None:
        self.closed += 1


class Collective(Direct):
    """The same in one transfer for all."""

    collective = True
    ways = (False,)


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield "head", torch.ones(3)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


def make_generators() -> list[Generator]:
    generators = []
    for number in range(2):
        server: Any = SimpleNamespace(
            url="", name=f"generator {number}", token="", trust=None, settings=SimpleNamespace(tensor_parallel_size=1)
        )
        generator = Generator(server, 4)
        generator.client = Client()  # type: ignore[assignment]
        generators.append(generator)
    return generators


async def probe(generator: Generator) -> None:
    if generator.client.holds != zlib.crc32(torch.ones(3).numpy()):  # type: ignore[attr-defined]
        raise GeneratorError(f"{generator.name} does not compute what the policy computes")
    generator.prove()


def make_sync(loop: LoopThread, kind: type[Direct] = Direct) -> tuple[Sync, list[Generator]]:
    return Sync(Control(loop, 5.0, 5.0), kind, "run-0"), make_generators()


def posted(generator: Generator) -> list[str]:
    return generator.client.posted  # type: ignore[attr-defined,no-any-return]


def test_a_sync_pauses_updates_and_resumes_and_only_a_probe_opens(loop: LoopThread) -> None:
    sync, generators = make_sync(loop)
    assert sync.move(weights, generators, 3, probe) == {}
    for generator in generators:
        assert posted(generator) == ["/init_weight_transfer_engine", *PHASES, "/resume"]
        assert generator.open and generator.version == 3
    assert sync.pause_seconds > 0


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("times", [1, 2])
def test_a_phase_that_fails_is_tried_again_and_nobody_writes_before_it_worked(
    loop: LoopThread, phase: str, times: int
) -> None:
    sync, (healthy, failing) = make_sync(loop)
    failing.client.failing = {phase: times}  # type: ignore[attr-defined]
    assert sync.move(weights, [healthy, failing], 3, probe) == {}
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
def test_who_fails_every_attempt_is_named_with_phase_and_seconds_and_never_opens(loop: LoopThread, phase: str) -> None:
    sync, (healthy, failing) = make_sync(loop)
    failing.client.failing = {phase: 100}  # type: ignore[attr-defined]
    failed = sync.move(weights, [healthy, failing], 3, probe)
    assert list(failed) == [failing]
    assert phase.split("?")[0] in failed[failing] and "version 3 failed after" in failed[failing]
    assert healthy.open and not failing.open
    if phase != "/resume":
        assert "/resume" not in posted(failing)


@pytest.mark.parametrize("phase", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_a_call_that_was_done_and_looked_like_a_failure_does_not_stand_in_the_way_of_the_next_attempt(
    loop: LoopThread, phase: str
) -> None:
    sync, (healthy, unheard) = make_sync(loop)
    unheard.client.unanswered = {phase}  # type: ignore[attr-defined]
    assert sync.move(weights, [healthy, unheard], 3, probe) == {}
    assert posted(unheard)[-8:] == [*AGAIN, "/resume"] and posted(unheard).count(PHASES[0]) == 2
    assert unheard.open and healthy.open


@pytest.mark.parametrize("phase", ["/pause?mode=keep", "/is_paused", "/weight_info"])
def test_who_does_not_answer_a_short_call_stands_still_and_is_not_asked_again(loop: LoopThread, phase: str) -> None:
    sync, (healthy, frozen) = make_sync(loop)
    frozen.client.silent = {phase}  # type: ignore[attr-defined]
    failed = sync.move(weights, [healthy, frozen], 3, probe)
    assert list(failed) == [frozen] and phase.split("?")[0] in failed[frozen]
    assert posted(frozen).count(phase) == 1 and not frozen.open
    assert posted(healthy).count("/resume") == 1 and healthy.open


def test_a_short_call_has_at_most_the_deadline_of_a_phase(loop: LoopThread) -> None:
    assert Control(loop, 10.0, 60.0).silence_s == 10.0
    assert Control(loop, 300.0, 60.0).silence_s == 60.0


@pytest.mark.parametrize("times", [1, 2])
def test_a_connection_that_fails_is_made_again(loop: LoopThread, times: int) -> None:
    sync, (healthy, failing) = make_sync(loop)
    failing.client.failing = {"/init_weight_transfer_engine": times}  # type: ignore[attr-defined]
    assert sync.move(weights, [healthy, failing], 3, probe) == {}
    assert posted(failing) == ["/init_weight_transfer_engine"] * (times + 1) + [*PHASES, "/resume"]
    assert posted(healthy) == ["/init_weight_transfer_engine", *PHASES, "/resume"]
    assert failing.open and failing.version == 3


@pytest.mark.parametrize("phase", ["/pause?mode=keep", "/update_weights", "/finish_weight_update"])
def test_a_call_that_came_back_without_being_done_is_noticed(loop: LoopThread, phase: str) -> None:
    sync, (healthy, liar) = make_sync(loop)
    liar.client.lying = {phase}  # type: ignore[attr-defined]
    failed = sync.move(weights, [healthy, liar], 3, probe)
    assert list(failed) == [liar] and not liar.open and healthy.open
    if phase == "/pause?mode=keep":
        assert "/update_weights" not in posted(liar)


def test_a_generator_that_fails_its_probe_is_not_tried_again(loop: LoopThread) -> None:
    sync, (healthy, liar) = make_sync(loop)

    async def lied(generator: Generator) -> None:
        if generator is liar:
            raise GeneratorError("generator 1 does not compute what the policy computes")
        await probe(generator)

    failed = sync.move(weights, [healthy, liar], 3, lied)
    assert list(failed) == [liar] and "does not compute" in failed[liar] and not liar.open
    assert posted(liar).count("/resume") == 1 and healthy.open


def test_without_room_for_the_weights_the_other_way_is_taken(loop: LoopThread) -> None:
    sync, generators = make_sync(loop)
    sync._transport.full = True  # type: ignore[attr-defined]
    assert sync.move(weights, generators, 3, probe) == {}
    assert sync._transport.staged == [False, False, True]  # type: ignore[attr-defined]
    assert all(posted(generator).count("/pause?mode=keep") == 1 for generator in generators)


def test_a_newcomer_connects_and_the_others_do_not_again(loop: LoopThread) -> None:
    sync, (first, newcomer) = make_sync(loop)
    sync.move(weights, [first], 1, probe)
    sync.move(weights, [newcomer], 1, probe)
    sync.move(weights, [first, newcomer], 2, probe)
    assert posted(first).count("/init_weight_transfer_engine") == 1
    assert posted(newcomer)[0] == "/init_weight_transfer_engine" and newcomer.open
    assert posted(newcomer).count("/init_weight_transfer_engine") == 1


def test_a_collective_transfer_connects_everybody_anew_when_one_is_new(loop: LoopThread) -> None:
    sync, (first, newcomer) = make_sync(loop, Collective)
    sync.move(weights, [first], 1, probe)
    before = sync._transport
    sync.move(weights, [first, newcomer], 2, probe)
    assert before.closed == 1 and sync._transport is not before  # type: ignore[attr-defined]
    assert posted(first).count("/init_weight_transfer_engine") == 2 and first.open and newcomer.open


def test_a_collective_transfer_connects_everybody_anew_when_one_has_left(loop: LoopThread) -> None:
    sync, (first, leaver) = make_sync(loop, Collective)
    sync.move(weights, [first, leaver], 1, probe)
    assert sync.move(weights, [first], 2, probe) == {}
    assert posted(first).count("/init_weight_transfer_engine") == 2 and first.open and first.version == 2
    sync.move(weights, [first], 3, probe)
    assert posted(first).count("/init_weight_transfer_engine") == 2


def test_a_broken_collective_gives_up_everybody_at_once(loop: LoopThread) -> None:
    sync, generators = make_sync(loop, Collective)
    generators[1].client.failing = {"/update_weights": 1}  # type: ignore[attr-defined]
    failed = sync.move(weights, generators, 3, probe)
    assert set(failed) == set(generators) and not any(generator.open for generator in generators)
    assert "/resume" not in posted(generators[0])
