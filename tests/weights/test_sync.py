"""Syncs in which each phase goes wrong for one of two generators.

Covers lrl/weights/pool_calls.py.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import pytest
import torch

from lrl.errors import GeneratorError
from lrl.generators.generator import Generator, KeysAndValues
from lrl.generators.pool import GeneratorPool, Prove
from lrl.system.event_loop import LoopThread
from lrl.types import Rollout
from lrl.weights.pool_calls import INIT, UPDATE, PoolCalls
from lrl.weights.sync import Sync
from tests.generators.model_fleet import request
from tests.weights.model_sync import PAUSE, POLICY, Collective, Direct, make_generators
from tests.weights.scene import give

OPEN = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
PHASES = [PAUSE, "/is_paused", *OPEN, "/weight_info"]
RESUME = ["/resume", "/is_paused"]


def make_sync(
    loop: LoopThread, kind: type[Direct] = Direct, **settings: Any
) -> tuple[Sync, list[Generator]]:
    generators = make_generators()
    settings |= {"deadline_s": 5.0, "silence_s": 5.0}
    transport = kind(POLICY, "run-0")
    sync = Sync(GeneratorPool(generators), loop, transport, lambda due: prove, **settings)
    return sync, generators


async def prove(generator: Generator) -> None:
    if generator.client.holds != zlib.crc32(torch.ones(3).numpy()):
        raise GeneratorError("it does not compute what the policy computes")


def posted(generator: Generator) -> list[str]:
    return generator.client.posted


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        *(("failing", phase) for phase in [*PHASES, "/resume"]),
        *(("unanswered", phase) for phase in [*OPEN, "/resume"]),
    ],
)
def test_a_failed_phase_is_retried_and_no_generator_writes_before_it_worked(
    loop: LoopThread, kind: str, phase: str
) -> None:
    sync, (healthy, failing) = make_sync(loop)
    setattr(failing.client, kind, {phase: 1} if kind == "failing" else {phase})
    assert give(sync, 3, [healthy, failing]) == {}
    assert posted(failing).count(PAUSE) == 2
    assert posted(failing).count("/resume") == (2 if phase == "/resume" else 1)
    # An update that the first attempt may have left open is closed.
    assert posted(failing)[-9:] == ["/finish_weight_update", *PHASES, *RESUME]
    # The other's failure costs it nothing.
    assert posted(healthy) == [INIT, *PHASES, *RESUME]
    assert sync.transport.staged == 2
    for generator in (healthy, failing):
        assert generator.serving and generator.version == 3


@pytest.mark.parametrize("phase", [INIT, *PHASES, "/resume"])
def test_a_generator_that_fails_every_attempt_is_named_with_phase_and_seconds_and_never_serves(
    loop: LoopThread, phase: str
) -> None:
    sync, (healthy, failing) = make_sync(loop)
    failing.client.failing = {phase: 100}
    failed = give(sync, 3, [healthy, failing])
    assert list(failed) == [failing]
    assert phase.split("?")[0] in failed[failing] and "version 3 failed after" in failed[failing]
    assert healthy.serving and not failing.serving
    if phase != "/resume":
        assert "/resume" not in posted(failing)


@pytest.mark.parametrize("phase", [PAUSE, "/is_paused", "/weight_info", "/resume"])
def test_a_generator_without_a_response_to_a_short_call_stays_paused_and_is_not_called_again(
    loop: LoopThread, phase: str
) -> None:
    sync, (healthy, frozen) = make_sync(loop)
    frozen.client.silent = {phase}
    failed = give(sync, 3, [healthy, frozen])
    assert list(failed) == [frozen] and phase.split("?")[0] in failed[frozen]
    assert posted(frozen).count(phase) == 1 and not frozen.serving
    assert posted(healthy).count("/resume") == 1 and healthy.serving


def test_a_generator_is_proved_at_its_first_sync_and_at_every_third_and_not_between(
    loop: LoopThread,
) -> None:
    sync, (old, newcomer) = make_sync(loop, prove_every_n_syncs=3)
    asked: list[list[Generator]] = []

    def make_proof(due: list[Generator]) -> Prove:
        asked.append(due)
        return prove

    sync.make_proof = make_proof
    for version in range(8):
        sync.pool.generators = [old, newcomer] if version > 0 else [old]
        assert sync.sync_now(version) == sync.wait() == {}
        assert old.serving and old.version == version
    assert asked == [[old], [newcomer], [old], [newcomer], [old], [newcomer]]


def test_a_generator_with_wrong_weights_never_serves_if_it_is_new_and_is_evicted_when_it_is_due(
    loop: LoopThread,
) -> None:
    sync, (healthy, liar) = make_sync(loop, prove_every_n_syncs=2)
    give(sync, 0, [healthy])
    liar.client.lying = {UPDATE}
    assert list(give(sync, 1, [healthy, liar])) == [liar]
    assert liar.served_from is None and liar.eviction
    healthy.client.lying, healthy.client.holds = {UPDATE}, "old weights"
    assert list(give(sync, 2, [healthy])) == [healthy]
    assert "proof of weight version 2 failed" in (healthy.eviction or "")


@pytest.mark.parametrize("attempts", ["recompute", "keep"])
def test_only_tokens_in_flight_count_as_recomputed(
    loop: LoopThread, attempts: KeysAndValues
) -> None:
    sync, generators = make_sync(loop, keys_and_values=attempts)
    give(sync, 1, generators)
    half, fresh, ended = (
        Rollout(token_ids=[1, 2]),
        Rollout(),
        Rollout(token_ids=[1], finish_reason="stop"),
    )
    generators[0].stats.begin(request(10, half, fresh, ended))
    generators[1].client.failing = {"/update_weights": 1}
    generators[1].stats.begin(request(100, Rollout(token_ids=[1])))
    give(sync, 2, generators)
    pauses = {route for generator in generators for route in posted(generator) if "/pause" in route}
    assert pauses == {
        f"/pause?mode=keep&clear_cache={'true' if attempts == 'recompute' else 'false'}"
    }
    assert sync.recomputed_tokens == (12 + 101 if attempts == "recompute" else 0)


def test_a_connection_that_fails_is_made_again(loop: LoopThread) -> None:
    sync, (healthy, failing) = make_sync(loop)
    failing.client.failing = {INIT: 1}
    assert give(sync, 3, [healthy, failing]) == {}
    assert posted(failing) == [INIT, "/finish_weight_update", INIT, *PHASES, *RESUME]
    assert posted(healthy) == [INIT, *PHASES, *RESUME]
    assert failing.serving and failing.version == 3


@pytest.mark.parametrize("phase", [PAUSE, "/update_weights", "/finish_weight_update", "/resume"])
def test_a_call_without_effect_is_noticed(loop: LoopThread, phase: str) -> None:
    sync, (healthy, liar) = make_sync(loop)
    liar.client.lying = {phase}
    failed = give(sync, 3, [healthy, liar])
    assert list(failed) == [liar] and not liar.serving and healthy.serving
    if phase == PAUSE:
        assert "/update_weights" not in posted(liar)


def test_without_room_for_the_weights_no_generator_is_paused_and_the_run_ends(
    loop: LoopThread,
) -> None:
    sync, generators = make_sync(loop)
    sync.transport.full = True
    with pytest.raises(OSError, match="0.00 GiB are free"):
        give(sync, 3, generators)
    assert all(PHASES[0] not in posted(generator) for generator in generators)


def test_a_new_generator_connects_and_the_others_do_not_again(loop: LoopThread) -> None:
    sync, (first, newcomer) = make_sync(loop)
    give(sync, 1, [first])
    give(sync, 1, [newcomer])
    give(sync, 2, [first, newcomer])
    assert posted(first).count(INIT) == 1
    assert posted(newcomer)[0] == INIT and newcomer.serving
    assert posted(newcomer).count(INIT) == 1


def test_a_collective_transfer_connects_everybody_anew_when_one_is_new_or_has_left(
    loop: LoopThread,
) -> None:
    sync, (first, other) = make_sync(loop, Collective)
    give(sync, 1, [first])
    closed = sync.transport.closed
    give(sync, 2, [first, other])
    assert sync.transport.closed == closed + 1
    assert first.serving and other.serving and posted(first).count(INIT) == 2
    assert give(sync, 3, [first]) == give(sync, 4, [first]) == {}
    assert first.serving and first.version == 4 and posted(first).count(INIT) == 3


@pytest.mark.parametrize("phase", [INIT, *PHASES])
def test_a_broken_collective_costs_only_who_broke_it_and_the_others_get_the_weights_in_the_same_sync(
    loop: LoopThread, phase: str
) -> None:
    sync, (healthy, failing) = make_sync(loop, Collective)
    failing.client.failing = {phase: 1}
    failed = give(sync, 3, [healthy, failing])
    assert list(failed) == [failing] and phase.split("?")[0] in failed[failing]
    assert healthy.serving and healthy.version == 3 and not failing.serving
    assert "/resume" not in posted(failing) and posted(healthy).count("/resume") == 1
    connected = posted(healthy).count(INIT)
    assert connected == (1 if phase == "/weight_info" else 2), "the others connect without it"


def calls_of(loop: LoopThread, **settings: Any) -> PoolCalls:
    """The calls to two generators, one of which does not answer."""
    calls = PoolCalls(loop, **{"deadline_s": 5.0, "silence_s": 5.0} | settings)
    generators: Any = make_generators()
    generators[1].client.stuck = UPDATE
    calls.version = 3
    calls.begin(generators)
    return calls


def test_a_call_that_never_ends_names_itself_and_the_version(loop: LoopThread) -> None:
    async def endless(generator: object) -> None:
        await asyncio.sleep(300)

    # The loop adds 5 s to what the client is given.
    with pytest.raises(TimeoutError, match="/update_weights for weight version 3"):
        calls_of(loop, deadline_s=-4.9).each(UPDATE, endless)


def test_a_signal_ends_the_wait_for_a_phase(loop: LoopThread) -> None:
    def told() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calls_of(loop, interrupted=told).update(lambda one: {})
