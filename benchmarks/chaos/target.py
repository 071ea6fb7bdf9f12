"""The run that is broken: the quickstart's task with two real generators. It resumes from its own
checkpoint: the same command starts it again after every kill. Its argument is `TargetSettings` as
JSON. It writes what it trains into `journal.jsonl` in its folder, and ends after the step that
finds the file `stop` there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc import locate
from typing import Any

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


def where(settings: TargetSettings) -> dict[str, Any]:
    server = server_settings()
    server.max_num_seqs = settings.capacity
    server.extra_args = WITH_A_WORKER
    common: dict[str, Any] = {
        "server": server,
        "heartbeat_s": settings.heartbeat_s,
        "generator_timeout_s": 600.0,
    }
    if settings.second_node:
        server.host, server.insecure = settings.host, True
        common |= {"join_port": JOIN_PORT, "launcher": Given(GENERATORS)}
    own = 0 if settings.second_node else GENERATORS
    return {"devices": 1 + own, "strategy": lrl.AsyncSingleDevice(generator_devices=own, **common)}


def main() -> None:
    settings = TargetSettings(**json.loads(sys.argv[1]))
    folder = Path(settings.folder)
    obey(folder)
    journal = Journal(folder / "journal.jsonl")
    journal.write("launch")
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
    callbacks = [
        WeightSync(deadline_s=settings.sync_deadline_s, probe_tolerance=PROBE_TOLERANCE),
        Throughput(),
        FleetRecorder(journal),
        StepRecorder(journal, folder / "stop"),
        ModelCheckpoint(
            folder,
            save_top_k=0,
            save_last=True,
            every_n_train_steps=1,
            enable_version_counter=False,
        ),
    ]
    how = {"enable_checkpointing": True, "callbacks": callbacks, **where(settings)}
    trainer = quiet_trainer(of_run.steps, folder, **how)
    policy = make_module(of_run, lrl.objectives.AIPO(rho=4.0))
    last = folder / "last.ckpt"
    trainer.fit(policy, data, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
