"""A real run with the lent server; a second generator joins in the middle by `lrl join`, and leaves
again. Those of Ray, SLURM and a second node join from another machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lrl
from lrl.callbacks.base import run_of
from lrl.generators.generator import Generator
from tests.lent_server import Borrowing, LentServer
from tests.runs.test_async_run import train_every_prompt_once

JOINS_AT, LEAVES_AT = 1, 3
LRL = [sys.executable, "-c", "from lrl.cli.main import main; raise SystemExit(main())"]
START_S = 300.0


class Guest(L.Callback):
    """Has a generator join before one step and leave before another; on other steps it only counts."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.alive: list[int] = []
        self.generators: dict[str, Generator] = {}
        self.joining: subprocess.Popen[str] | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        fleet = run_of(trainer).fleet
        self.alive.append(fleet.alive)
        self.generators |= {one.name: one for one in fleet.generators}
        if trainer.global_step == JOINS_AT:
            self.joining = subprocess.Popen(
                [*LRL, "join", str(self.run)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            end = time.monotonic() + START_S
            while not fleet.rollouts.pending:
                assert self.joining.poll() is None and time.monotonic() < end
                time.sleep(0.1)
        if trainer.global_step == LEAVES_AT:
            subprocess.run([*LRL, "leave", str(self.run)], check=True, timeout=300)


def test_a_generator_joins_a_run_writes_and_leaves_with_every_prompt_trained_once(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few at once that requests always wait: the second generator gets some as soon as it serves.
    settings = lrl.ServerSettings(max_num_seqs=8, dtype="float32", kv_cache_gib=0.1)
    strategy = Borrowing(lent_server, server=settings)
    # No generator's log is in the run's folder, so `lrl join` finds no token there.
    monkeypatch.setenv("LRL_TOKEN", strategy.token)
    guest = Guest(tmp_path)
    sizes: dict[str, Any] = {"devices": 2, "steps": 6, "groups": 4, "max_lag": 2}
    try:
        trainer, _ = train_every_prompt_once(strategy, policy_folder, tmp_path, guest, **sizes)
        assert guest.joining is not None
        message, _ = guest.joining.communicate(timeout=300)
    finally:
        if guest.joining is not None:
            guest.joining.kill()
    assert guest.joining.returncode == 0, message
    assert strategy.choose_transport().backend == "shared_memory"
    assert "generator 1: serves since version" in message and "generator 1: has left" in message
    first, both = guest.alive[: JOINS_AT + 1], guest.alive[JOINS_AT + 1 : LEAVES_AT + 1]
    assert set(first) == set(guest.alive[LEAVES_AT + 1 :]) == {1} and set(both) == {2}
    written = {name: one.stats.snapshot().written for name, one in guest.generators.items()}
    assert set(written) == {"generator 0", "generator 1"} and min(written.values()) > 0
    metrics = trainer.callback_metrics
    assert metrics["fleet/joined"] == 1 and metrics["fleet/left"] == 1
    assert "fleet/restarts" not in metrics and not (tmp_path / "fleet").exists()
