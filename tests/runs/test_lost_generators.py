"""A real run with two real generators, of which first one dies and then the other freezes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import lightning as L
import psutil

import lrl
from lrl.callbacks.base import run_of
from lrl.generators.generator import Generator
from tests.leftovers import engines, wait_for
from tests.runs.test_async_run import SMALL, train_every_prompt_once

STEPS = 8


def engine_of(generator: Generator) -> psutil.Process:
    supervisor = generator.server._supervisor
    assert supervisor is not None
    (engine,) = engines(psutil.Process(supervisor.pid))
    return engine


class Faults(L.Callback):
    """Kills the engine of one generator, then freezes the engine of the other before the first is
    back."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        fleet = run_of(trainer).fleet
        if trainer.global_step == 2:
            engine_of(fleet.generators[1]).send_signal(signal.SIGKILL)
        if trainer.global_step == 3:
            engine_of(fleet.generators[0]).send_signal(signal.SIGSTOP)
        if trainer.global_step == STEPS - 1:
            run = run_of(trainer)
            wait_for(lambda: run.poll() or fleet.alive == 2, 900.0, "both generators")


def test_a_run_survives_a_dead_and_a_frozen_generator_with_every_prompt_trained_once(
    policy_folder: Path, tmp_path: Path
) -> None:
    settings = lrl.ServerSettings(**SMALL)
    strategy = lrl.AsyncSingleDevice(
        generator_devices=2, server=settings, heartbeat_s=5.0, generator_timeout_s=900.0
    )
    trainer, _ = train_every_prompt_once(
        strategy,
        policy_folder,
        tmp_path,
        Faults(),
        devices=3,
        steps=STEPS,
        groups=4,
        max_lag=2,
        sync_deadline_s=10.0,
    )
    # On a busy machine a generator that is well may let a heartbeat pass, too.
    assert trainer.callback_metrics["fleet/restarts"] >= 2
    assert trainer.callback_metrics["fleet/alive"] == 2
