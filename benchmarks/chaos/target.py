"""The run that is broken: the quickstart's task with two real generators. It resumes from its own
checkpoint: the same command starts it again after every kill. Its argument is `TargetSettings` as
JSON. It writes what it trains into `journal.jsonl` in its folder, and ends after the step that
finds the file `stop` there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from pydoc import locate
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

import lrl
from benchmarks.chaos.faults import GENERATORS, WITH_A_WORKER, obey
from benchmarks.chaos.journal import Journal
from benchmarks.chaos.launch import JOIN_PORT, TargetSettings
from benchmarks.chaos.recorder import FleetRecorder, StepRecorder
from benchmarks.quickstart_run import (
    PROBE_TOLERANCE,
    RunSettings,
    make_data,
    make_module,
    server_settings,
)
from benchmarks.runs import quiet_trainer
from lrl.callbacks import Throughput, WeightSync
from lrl.members.launchers import Given


def make_callbacks(settings: TargetSettings, folder: Path, rank: int) -> list[L.Callback]:
    """Returns the callbacks in the order in which they run after a step; Lightning puts the
    checkpoint last."""
    journal = Journal(folder / "journal.jsonl")
    if rank == 0:
        journal.write("launch")
    tolerance = PROBE_TOLERANCE["float32"]
    sync = WeightSync(deadline_s=settings.sync_deadline_s, probe_tolerance=tolerance)
    checkpoint = ModelCheckpoint(
        folder,
        save_top_k=0,
        save_last=True,
        every_n_train_steps=1,
        enable_version_counter=False,
    )
    recorders = [FleetRecorder(journal), StepRecorder(journal, folder / "stop")]
    return [sync, Throughput(), *recorders, checkpoint]


def where(settings: TargetSettings) -> dict[str, Any]:
    server = server_settings()
    server.max_num_seqs = settings.capacity
    server.extra_args = WITH_A_WORKER
    common: dict[str, Any] = {
        "server": server,
        "heartbeat_s": settings.heartbeat_s,
        "generator_timeout_s": 600.0,
    }
    if settings.host:
        server.host, server.insecure = settings.host, True
        common["join_port"] = JOIN_PORT
    if settings.second_node == "trainer":
        strategy = lrl.AsyncDDP(generator_devices=1, **common)
        return {"devices": 2, "num_nodes": 2, "strategy": strategy}
    if settings.second_node == "given":
        launcher = Given(GENERATORS)
        strategy = lrl.AsyncSingleDevice(generator_devices=0, launcher=launcher, **common)
        return {"devices": 1, "strategy": strategy}
    strategy = lrl.AsyncSingleDevice(generator_devices=GENERATORS, **common)
    return {"devices": 1 + GENERATORS, "strategy": strategy}


def main() -> None:
    settings = TargetSettings(**json.loads(sys.argv[1]))
    folder = Path(settings.folder)
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
    if rank == 0:
        obey(folder)
    of_run = RunSettings(
        seed=settings.seed,
        max_lag=2,
        lr=settings.lr,
        schedule="constant",
        steps=-1,
        groups=settings.groups,
        responses=settings.responses,
    )
    environment: Any = locate(settings.environment) if settings.environment else None
    rows = settings.steps_per_epoch * settings.groups or None
    data = make_data(of_run, limit=rows, environment=environment and environment())
    last = folder / "last.ckpt"
    trainer = quiet_trainer(
        of_run.steps,
        folder,
        enable_checkpointing=True,
        callbacks=make_callbacks(settings, folder, rank),
        **where(settings),
    )
    policy = make_module(of_run, lrl.objectives.AIPO(rho=4.0))
    trainer.fit(policy, data, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
