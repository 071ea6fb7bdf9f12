"""Who waits for the proof of a sync, and what becomes of what was written before it.

Covers lrl/weights/syncs.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lrl.callbacks import WeightSync
from lrl.generators.generator import Generator
from tests.callbacks.model_run import ModelRun, proved
from tests.leftovers import wait_for
from tests.weights.model_sync import PAUSE


@pytest.fixture
def model_run() -> Iterator[ModelRun]:
    run = ModelRun()
    run.step(0)
    yield run
    run.end()


def test_only_the_first_sync_of_a_run_is_waited_for_until_it_is_verified(
    model_run: ModelRun,
) -> None:
    assert proved(model_run.pool.generators) == [0, 0]
    model_run.hold(True)
    model_run.step(1)
    assert model_run.versions == [0, 1] and model_run.pool.serving == []
    assert len(model_run.pool.alive) == 2  # they write on
    model_run.hold(False)
    wait_for(lambda: proved(model_run.pool.generators) == [1, 1])


@pytest.mark.parametrize("what", ["a sync", "a checkpoint"])
def test_nothing_is_synced_and_nothing_is_saved_before_the_last_sync_is_verified(
    model_run: ModelRun, what: str
) -> None:
    model_run.hold(True)
    model_run.step(1)
    done: list[Any] = []
    act = {"a sync": lambda: model_run.step(2), "a checkpoint": model_run.data.state_dict}[what]
    thread = threading.Thread(target=lambda: done.append(act()))
    thread.start()
    wait_for(lambda: model_run.stopwatch.state == "probe")
    assert not done and all(client.posted.count(PAUSE) == 2 for client in model_run.clients)
    model_run.hold(False)
    thread.join(60)
    assert done and model_run.stopwatch.seconds("probe") > 0
    wait_for(lambda: proved(model_run.pool.generators) == ([2, 2] if what == "a sync" else [1, 1]))


def test_a_checkpoint_has_every_token_that_was_written_when_it_began(model_run: ModelRun) -> None:
    arrived: list[str] = []

    async def flush(name: str, deadline_s: float) -> None:
        await asyncio.sleep(0.01)
        arrived.append(name)

    for number, client in enumerate(model_run.clients):
        client.flush = partial(flush, f"of generator {number}")  # type: ignore[method-assign]
    calls: Any = model_run.calls
    calls.state_dict = lambda step: {"tokens": sorted(arrived)}
    assert model_run.data.state_dict()["ledger"]["tokens"] == ["of generator 0", "of generator 1"]


def test_a_generator_that_fails_a_probe_beside_the_step_is_evicted_at_once_and_the_other_serves(
    model_run: ModelRun,
) -> None:
    liar, healthy = model_run.pool.generators
    lost: list[Generator] = []
    model_run.pool.on_evicted = lost.append
    liar.client.logprobs = [-1.0, -9.0]  # type: ignore[attr-defined]
    model_run.step(1)
    wait_for(lambda: lost)
    assert (
        lost == [liar]
        and not liar.unverified
        and "does not compute what the policy computes" in (liar.eviction or "")
    )
    assert "probe for weight version 1 failed after" in (liar.eviction or "")
    model_run.step(2)
    wait_for(lambda: proved([healthy]) == [2])
    assert model_run.pool.generators == [healthy] and not liar.serving


def test_a_run_whose_first_sync_no_generator_passes_ends_with_the_reason_and_replaces_none() -> (
    None
):
    run, lost = ModelRun(), list[Generator]()
    run.pool.on_evicted = lost.append
    for client in run.clients:
        client.logprobs = [-1.0, -9.0]
    with pytest.raises(
        RuntimeError,
        match=r"generator 0 does not compute what the policy computes(.|\n)*generator 1",
    ):
        run.step(0)
    run.end()
    assert not lost and run.versions == []


def test_a_run_that_ends_before_a_proof_drops_unverified_tokens_without_waiting(
    model_run: ModelRun,
) -> None:
    model_run.hold(True)
    model_run.step(1)
    model_run.trainer.interrupted = True
    model_run.settle()
    assert all(generator.eviction for generator in model_run.pool.generators)
    assert not any(generator.unverified for generator in model_run.pool.generators)
    model_run.data.state_dict()  # does not wait: the probes are held still


def test_an_unknown_keys_and_values_is_refused_with_the_choices() -> None:
    with pytest.raises(
        ValueError, match=r"WeightSync.keys_and_values is 'drop'; choose from recompute, keep"
    ):
        WeightSync(keys_and_values="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(("how", "clears"), [("recompute", "true"), ("keep", "false")])
def test_every_sync_of_a_run_treats_keys_and_values_by_the_setting(
    model_run: ModelRun, how: Any, clears: str
) -> None:
    model_run.settings.keys_and_values = how
    model_run._syncs = model_run.settings.make_syncs(model_run)
    model_run.step(1)
    assert all(
        f"/pause?mode=keep&clear_cache={clears}" in client.posted[-10:]
        for client in model_run.clients
    )
    assert model_run.syncs.recomputed_tokens == 0  # nothing was being written


def test_a_generator_that_waits_for_its_proof_is_not_called_lost(
    model_run: ModelRun, caplog: pytest.LogCaptureFixture
) -> None:
    model_run.hold(True)
    model_run.step(1)
    with caplog.at_level(logging.WARNING):
        model_run.poll()
    assert not caplog.text and model_run.pool.alone_since is None


@pytest.mark.parametrize(
    ("how", "begun", "version", "compares"),
    [
        ("recompute", 0, 0, True),
        ("keep", 0, 0, True),  # nothing was written over an older version's keys and values yet
        ("keep", 0, 3, False),
        ("recompute", 0, 3, True),
        (
            "recompute",
            3,
            3,
            False,
        ),  # a resumed run's first tokens may be of the generators of the run before
        ("recompute", 3, 4, True),
        ("keep", 3, 4, False),
    ],
)
def test_sampled_tokens_are_compared_only_where_nothing_but_rounding_can_differ(
    model_run: ModelRun, how: Any, begun: int, version: int, compares: bool
) -> None:
    model_run.settings.keys_and_values = how
    model_run.first_version = begun
    model_run.trainer.global_step = version
    assert (model_run.settings.sampled_tolerance(model_run) is not None) == compares


def test_the_limit_of_sampled_tokens_knows_temperature_and_the_format_of_training(
    model_run: ModelRun,
) -> None:
    sync, policy = model_run.settings, model_run.policy
    at_one = sync.sampled_tolerance(model_run)
    model_run.data.sampling = replace(model_run.data.sampling, temperature=0.5)
    assert at_one is not None and sync.sampled_tolerance(model_run) == 2 * at_one
    policy.training_dtype = "bfloat16"
    assert (sync.sampled_tolerance(model_run) or 0.0) > 100 * at_one
