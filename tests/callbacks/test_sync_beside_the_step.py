"""A sync whose weights are copied: the trainer continues, and nothing else may.

Covers lrl/weights/sync.py.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lrl.weights.sync import RunEnded
from tests.callbacks.model_run import ModelRun, serving
from tests.leftovers import wait_for
from tests.weights.model_sync import INIT, PAUSE, UPDATE, Copying, make_generators


@pytest.fixture
def model_run() -> Iterator[ModelRun]:
    run = ModelRun(transport=Copying)
    run.step(0)
    yield run
    run.end()


def test_the_trainer_continues_and_prompts_are_admitted_only_when_the_generators_hold_the_version(
    model_run: ModelRun,
) -> None:
    assert model_run.versions == [0]
    model_run.stick(UPDATE)
    model_run.step(1)
    wait_for(lambda: all(UPDATE in client.posted[-1] for client in model_run.clients))
    assert (
        model_run.versions == [0]
        and model_run.pool.serving == []
        and len(model_run.pool.alive) == 2
    )
    model_run.stick("")
    wait_for(lambda: model_run.versions == [0, 1] and serving(model_run.pool.generators) == [1, 1])
    assert model_run.version == 1 and model_run.pause_seconds > 0


def test_when_the_trainer_continues_no_response_begins_under_the_version_before(
    model_run: ModelRun,
) -> None:
    sync, begins = model_run.syncs[model_run.pool], threading.Event()
    run: Any = sync._finish_in_background
    sync._finish_in_background = lambda *parts: begins.wait(60) and run(*parts)  # type: ignore[assignment]
    model_run.step(1)
    assert model_run.pool.serving == [] and len(model_run.pool.alive) == 2
    begins.set()
    wait_for(lambda: serving(model_run.pool.generators) == [1, 1])


def test_the_generators_get_the_staged_weights_and_not_the_ones_trained_meanwhile(
    model_run: ModelRun,
) -> None:
    weight = torch.ones(3)
    model_run.trainer.lightning_module.whole_weights = lambda: iter([("head", weight)])
    staged = zlib.crc32(weight.numpy())
    model_run.stick(PAUSE)
    model_run.step(1)
    weight += 1
    model_run.stick("")
    wait_for(lambda: serving(model_run.pool.generators) == [1, 1])
    assert [client.holds for client in model_run.clients] == [staged, staged]


@pytest.mark.parametrize("what", ["another sync", "a checkpoint", "the end of training"])
def test_others_wait_until_the_sync_is_over(model_run: ModelRun, what: str) -> None:
    model_run.stick(UPDATE)
    model_run.step(1)
    done: list[Any] = []
    act = {
        "another sync": lambda: model_run.step(2),
        "a checkpoint": model_run.data.state_dict,
        "the end of training": lambda: model_run.settings.on_train_end(model_run.trainer, None),  # type: ignore[arg-type]
    }[what]
    thread = threading.Thread(target=lambda: done.append(act()))
    thread.start()
    time.sleep(0.1)
    assert not done and all(client.posted.count(PAUSE) == 2 for client in model_run.clients)
    model_run.stick("")
    thread.join(60)
    last = 2 if what == "another sync" else 1
    wait_for(lambda: serving(model_run.pool.generators) == [last, last])
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


def test_a_generator_that_fails_both_attempts_is_evicted_by_name_and_never_writes_on(
    model_run: ModelRun,
) -> None:
    behind, healthy = model_run.pool.generators
    model_run.clients[0].failing = {UPDATE: 2}
    model_run.step(1)
    wait_for(lambda: model_run.versions == [0, 1] and serving([healthy]) == [1])
    assert UPDATE in (behind.eviction or "") and model_run.pool.generators == [healthy]
    client: Any = behind.client
    assert client.posted.count("/resume") == 1, "that of the first sync"


def test_a_new_generator_that_cannot_connect_is_logged_and_connected_while_the_trainer_waits(
    model_run: ModelRun, caplog: pytest.LogCaptureFixture
) -> None:
    newcomer = make_generators()[0]
    newcomer.client.failing = {INIT: 1}  # type: ignore[attr-defined]
    model_run.pool.pending.append(newcomer)
    model_run.step(1)
    assert f"attempt 1: {INIT} for weight version 1 failed" in caplog.text
    assert newcomer in model_run.pool.generators and model_run.versions == [0, 1]
    wait_for(lambda: serving(model_run.pool.generators) == [1, 1, 1])


@pytest.mark.parametrize("trainer", ["trains", "waits for it"])
def test_a_run_that_ends_interrupts_the_sync_and_no_generator_writes_on(
    model_run: ModelRun, trainer: str
) -> None:
    model_run.stick(UPDATE)
    model_run.step(1)
    wait_for(lambda: all(UPDATE in client.posted[-1] for client in model_run.clients))
    sync: Any = model_run.syncs[model_run.pool]
    background = sync._background
    if trainer == "waits for it":
        sync.interrupted = signal
        with pytest.raises(KeyboardInterrupt):
            model_run.step(2)
    model_run.trainer.interrupted = True
    model_run.settle()
    assert isinstance(background.exception(timeout=0), RunEnded)
    model_run.stick("")
    time.sleep(0.05)
    assert all(client.posted.count("/resume") == 1 for client in model_run.clients)
    assert model_run.versions == [0] and model_run.pool.serving == []
    model_run.data.state_dict()  # does not wait


def signal() -> None:
    raise KeyboardInterrupt


def test_an_error_beside_the_step_reaches_the_trainer(model_run: ModelRun) -> None:
    def refuse(version: int) -> None:
        raise TimeoutError("admitting prompts")

    model_run.calls.new_version = refuse  # type: ignore[method-assign]
    model_run.step(1)
    wait_for(lambda: model_run.syncs[model_run.pool].is_broken)
    with pytest.raises(TimeoutError, match="admitting prompts"):
        model_run.poll()
