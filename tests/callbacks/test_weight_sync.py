"""Which syncs are proved, who waits for a proof, and a sync whose weights are copied: the trainer
continues, and nothing else may.

Covers lrl/weights/sync.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lrl.generators.generator import Generator
from lrl.weights.pool_calls import UPDATE
from lrl.weights.sync import RunEnded
from tests.callbacks.model_run import ModelRun, serving
from tests.leftovers import wait_for
from tests.weights.model_sync import PAUSE, Copying, make_generators


@pytest.fixture
def model_run() -> Iterator[ModelRun]:
    run = ModelRun(prove_every_n_syncs=3)
    run.step(0)
    yield run
    run.end()


@pytest.fixture
def copying() -> Iterator[ModelRun]:
    run = ModelRun(transport=Copying)
    run.step(0)
    yield run
    run.end()


def proofs(model_run: ModelRun) -> list[int]:
    """Returns how often each generator was proved."""
    return [client.posted.count("proof") for client in model_run.clients]


def test_only_the_first_proof_of_a_run_is_waited_for(model_run: ModelRun) -> None:
    assert serving(model_run.pool.generators) == [0, 0] and proofs(model_run) == [1, 1]
    model_run.hold(True)
    for version in (1, 2, 3):
        model_run.step(version)
    wait_for(lambda: proofs(model_run) == [2, 2])
    assert model_run.versions == [0, 1, 2, 3], "the trainer continues"
    assert serving(model_run.pool.generators) == [3, 3], "they write on"
    model_run.hold(False)


def test_no_sync_begins_before_the_proof_of_the_last_one_has_ended(model_run: ModelRun) -> None:
    model_run.hold(True)
    for version in (1, 2, 3):
        model_run.step(version)
    thread = threading.Thread(target=lambda: model_run.step(4))
    thread.start()
    wait_for(lambda: model_run.stopwatch.state == "probe")
    assert all(client.posted.count(PAUSE) == 4 for client in model_run.clients)
    model_run.hold(False)
    thread.join(60)
    assert serving(model_run.pool.generators) == [4, 4]
    assert model_run.stopwatch.seconds("probe") > 0


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


def test_a_generator_that_fails_a_proof_beside_the_step_is_evicted_at_once_and_the_other_serves(
    model_run: ModelRun,
) -> None:
    liar, healthy = model_run.pool.generators
    lost: list[Generator] = []
    model_run.pool.on_evicted = lost.append
    liar.client.logprobs = [-1.0, -9.0]  # type: ignore[attr-defined]
    for version in (1, 2):
        model_run.step(version)
        assert serving([liar, healthy]) == [version, version], "nobody looks before the third sync"
    model_run.step(3)
    wait_for(lambda: lost)
    assert lost == [liar] and "does not compute what the policy computes" in (liar.eviction or "")
    assert "proof of weight version 3 failed" in (liar.eviction or "")
    assert "What it wrote since its last proof may be of wrong weights" in (liar.eviction or "")
    model_run.step(4)
    assert model_run.pool.generators == [healthy] and serving([healthy]) == [4]


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


def test_a_run_that_ends_by_an_error_does_not_wait_for_a_proof(model_run: ModelRun) -> None:
    model_run.hold(True)
    for version in (1, 2, 3):
        model_run.step(version)
    model_run.trainer.interrupted = True
    model_run.data.state_dict()
    assert not any(generator.eviction for generator in model_run.pool.generators)


@pytest.mark.parametrize(("how", "clears"), [("recompute", "true"), ("keep", "false")])
def test_every_sync_of_a_run_treats_keys_and_values_by_the_setting(
    model_run: ModelRun, how: Any, clears: str
) -> None:
    model_run.settings.keys_and_values = how
    model_run.syncs = model_run.settings.make_syncs(model_run)
    model_run.step(1)
    assert all(
        f"/pause?mode=keep&clear_cache={clears}" in client.posted[-10:]
        for client in model_run.clients
    )
    assert model_run.syncs[model_run.pool].recomputed_tokens == 0  # nothing was being written


def test_a_generator_that_waits_for_its_first_proof_is_not_called_lost(
    model_run: ModelRun, caplog: pytest.LogCaptureFixture
) -> None:
    newcomer = make_generators()[0]
    newcomer.client.holding = True  # type: ignore[attr-defined]
    model_run.pool.pending.append(newcomer)
    for lost in list(model_run.pool.generators):
        model_run.pool.generators.remove(lost)
    model_run.step(1)
    with caplog.at_level(logging.WARNING):
        model_run.poll()
    assert not caplog.text and model_run.pool._alone_since is None
    assert not newcomer.serving
    newcomer.client.holding = False  # type: ignore[attr-defined]
    wait_for(lambda: newcomer.serving)


def test_the_trainer_continues_and_prompts_are_admitted_only_when_the_generators_hold_the_version(
    copying: ModelRun,
) -> None:
    assert copying.versions == [0]
    copying.stick(UPDATE)
    copying.step(1)
    wait_for(lambda: all(UPDATE in client.posted[-1] for client in copying.clients))
    assert copying.versions == [0] and copying.pool.serving == [] and len(copying.pool.alive) == 2
    copying.stick("")
    wait_for(lambda: copying.versions == [0, 1] and serving(copying.pool.generators) == [1, 1])
    assert copying.version == 1 and copying.pause_seconds > 0


def test_the_generators_get_the_staged_weights_and_not_the_ones_trained_meanwhile(
    copying: ModelRun,
) -> None:
    weight = torch.ones(3)
    copying.trainer.lightning_module.whole_weights = lambda: iter([("head", weight)])
    staged = zlib.crc32(weight.numpy())
    copying.stick(PAUSE)
    copying.step(1)
    weight += 1
    copying.stick("")
    wait_for(lambda: serving(copying.pool.generators) == [1, 1])
    assert [client.holds for client in copying.clients] == [staged, staged]


@pytest.mark.parametrize("what", ["another sync", "a checkpoint", "the end of training"])
def test_others_wait_until_the_sync_is_over(copying: ModelRun, what: str) -> None:
    copying.stick(UPDATE)
    copying.step(1)
    done: list[Any] = []
    act = {
        "another sync": lambda: copying.step(2),
        "a checkpoint": copying.data.state_dict,
        "the end of training": lambda: copying.settings.on_train_end(copying.trainer, None),  # type: ignore[arg-type]
    }[what]
    thread = threading.Thread(target=lambda: done.append(act()))
    thread.start()
    time.sleep(0.1)
    assert not done and all(client.posted.count(PAUSE) == 2 for client in copying.clients)
    copying.stick("")
    thread.join(60)
    last = 2 if what == "another sync" else 1
    wait_for(lambda: serving(copying.pool.generators) == [last, last])
    assert done


@pytest.mark.parametrize(
    "how", [{"max_lag": 0, "transport": Copying}, {}], ids=["lag 0", "no copy"]
)
def test_a_trainer_that_may_do_nothing_beside_a_sync_waits_for_it(how: dict[str, Any]) -> None:
    run = ModelRun(**how)
    run.step(0)
    run.step(1)
    assert run.versions == [0, 1] and len(run.pool.alive) == 2
    run.end()


@pytest.mark.parametrize("trainer", ["trains", "waits for it"])
def test_a_run_that_ends_interrupts_the_sync_and_no_generator_writes_on(
    copying: ModelRun, trainer: str
) -> None:
    copying.stick(UPDATE)
    copying.step(1)
    wait_for(lambda: all(UPDATE in client.posted[-1] for client in copying.clients))
    sync: Any = copying.syncs[copying.pool]
    background = sync._background
    if trainer == "waits for it":
        sync.interrupted = signal
        with pytest.raises(KeyboardInterrupt):
            copying.step(2)
    copying.trainer.interrupted = True
    copying.settle()
    assert isinstance(background.exception(timeout=0), RunEnded)
    copying.stick("")
    time.sleep(0.05)
    assert all(client.posted.count("/resume") == 1 for client in copying.clients)
    assert copying.versions == [0] and copying.pool.serving == []
    copying.data.state_dict()  # does not wait


def signal() -> None:
    raise KeyboardInterrupt


def test_an_error_beside_the_step_reaches_the_trainer(copying: ModelRun) -> None:
    def refuse(version: int) -> None:
        raise TimeoutError("admitting prompts")

    copying.calls.new_version = refuse  # type: ignore[method-assign]
    copying.step(1)
    wait_for(lambda: copying.syncs[copying.pool].is_broken)
    with pytest.raises(TimeoutError, match="admitting prompts"):
        copying.poll()
