"""Who waits for the proof of a sync, and what becomes of what was written before it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import lrl
from lrl.callbacks import WeightSync, weight_sync
from lrl.generators.crew import Crew
from lrl.generators.generator import Generator
from lrl.generators.loop import LoopThread
from lrl.generators.patience import Patience
from tests.weights.model_sync import Client, Direct, make_generators, weights


class ModelRun:
    """A trainer with two generators that serve version 0, and a `WeightSync`."""

    def __init__(self) -> None:
        self.loop, self.crew = LoopThread(), Crew(make_generators())
        self.fleet = SimpleNamespace(
            loop=self.loop,
            rollouts=self.crew,
            crews=[self.crew],
            evaluation=None,
            heartbeat_s=5.0,
            patience=Patience(60.0, []),
            call=lambda work, what: self.loop.wait(work, 5.0, what),
        )
        self.data = lrl.RolloutDataModule(
            prompts=[{"prompt": "1+1=", "answer": "2"}], rewards=[lrl.rewards.ExactMatch()]
        )
        self.versions: list[int] = []
        self.data.new_version = self.versions.append  # type: ignore[method-assign]
        self.data.probe_tokens = lambda count: [1, 2, 3]  # type: ignore[method-assign]
        self.sync = WeightSync(deadline_s=5.0)
        self.trainer: Any = SimpleNamespace(
            strategy=SimpleNamespace(fleet=self.fleet, transport="direct", run_id="run"),
            datamodule=self.data,
            callbacks=[self.sync],
            global_step=0,
            training=True,
            lightning_module=SimpleNamespace(
                named_weights=weights, prompt_logprobs=lambda tokens: [-1.0, -1.0], dtype_name="float32"
            ),
        )
        self.data.trainer = self.trainer

    @property
    def clients(self) -> list[Client]:
        return [generator.client for generator in self.crew.generators]  # type: ignore[misc]

    def step(self, version: int) -> None:
        self.trainer.global_step = version
        self.sync.sync(self.trainer, self.trainer.lightning_module)

    def hold(self, holding: bool) -> None:
        for client in self.clients:
            client.holding = holding


@pytest.fixture
def model_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelRun]:
    monkeypatch.setattr(weight_sync, "make_transport", lambda name: Direct())
    run = ModelRun()
    run.step(0)
    yield run
    run.hold(False)
    run.loop.close()


def until(done: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def proved(generators: list[Generator]) -> list[int]:
    """The versions of those that may be asked."""
    return [generator.version for generator in generators if generator.open]


def test_only_the_first_sync_of_a_run_is_waited_for_until_it_is_proved(model_run: ModelRun) -> None:
    assert proved(model_run.crew.generators) == [0, 0]
    model_run.hold(True)
    model_run.step(1)
    assert model_run.versions == [0, 1] and model_run.crew.serving == []
    assert len(model_run.crew.alive) == 2  # they write on
    model_run.hold(False)
    until(lambda: proved(model_run.crew.generators) == [1, 1])


@pytest.mark.parametrize("what", ["a sync", "a checkpoint"])
def test_nothing_is_synced_and_nothing_is_saved_before_the_last_sync_is_proved(model_run: ModelRun, what: str) -> None:
    model_run.hold(True)
    model_run.step(1)
    done: list[Any] = []
    act = {"a sync": lambda: model_run.step(2), "a checkpoint": model_run.data.state_dict}[what]
    thread = threading.Thread(target=lambda: done.append(act()))
    thread.start()
    time.sleep(0.1)
    assert not done and all(client.posted.count("/pause?mode=keep") == 2 for client in model_run.clients)
    model_run.hold(False)
    thread.join(10)
    assert done and model_run.data.stopwatch.seconds("probe") > 0.05
    until(lambda: proved(model_run.crew.generators) == ([2, 2] if what == "a sync" else [1, 1]))


def test_who_fails_a_probe_that_nobody_waits_for_is_taken_out_at_once_and_the_other_serves(
    model_run: ModelRun,
) -> None:
    liar, healthy = model_run.crew.generators
    lost: list[Generator] = []
    model_run.crew.lost = lost.append
    liar.client.logprobs = [-1.0, -9.0]  # type: ignore[attr-defined]
    model_run.step(1)
    until(lambda: lost)
    assert lost == [liar] and not liar.unproved and "does not compute what the policy computes" in (liar.out or "")
    assert "probe for weight version 1 failed after" in (liar.out or "")
    model_run.step(2)
    until(lambda: proved([healthy]) == [2])
    assert model_run.crew.generators == [healthy] and not liar.open


def test_a_run_whose_first_sync_nobody_can_prove_ends_with_the_reason_and_replaces_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_sync, "make_transport", lambda name: Direct())
    run, lost = ModelRun(), list[Generator]()
    run.crew.lost = lost.append
    for client in run.clients:
        client.logprobs = [-1.0, -9.0]
    with pytest.raises(RuntimeError, match=r"generator 0 does not compute what the policy computes(.|\n)*generator 1"):
        run.step(0)
    run.loop.close()
    assert not lost and run.versions == []


def test_a_run_that_ends_before_a_proof_takes_back_what_is_unproved_and_does_not_wait_for_it(
    model_run: ModelRun,
) -> None:
    model_run.hold(True)
    model_run.step(1)
    model_run.sync.on_exception(model_run.trainer, model_run.trainer.lightning_module, KeyboardInterrupt())
    assert all(generator.out for generator in model_run.crew.generators)
    assert not any(generator.unproved for generator in model_run.crew.generators)
    model_run.data.state_dict()  # does not wait: the probes are held still


def test_a_generator_that_waits_for_its_proof_is_not_called_lost(
    model_run: ModelRun, caplog: pytest.LogCaptureFixture
) -> None:
    model_run.hold(True)
    model_run.step(1)
    with caplog.at_level(logging.WARNING):
        model_run.sync.tend(model_run.trainer)
    assert not caplog.text and model_run.crew.alone_since is None
