"""The run that is broken: the quickstart's task with two real generators. It resumes from its own
checkpoint.

    python -m benchmarks.chaos.target --folder F [--steps N] ...

The same command resumes it after every kill. It writes what it trains into `journal.jsonl` in its
folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from pydoc import locate
from typing import Any

import lightning as L
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint

import lrl
from benchmarks.chaos.faults import GENERATORS, WITH_A_WORKER, obey
from benchmarks.chaos.journal import Journal
from benchmarks.chaos.launch import JOIN_PORT, TargetSettings
from benchmarks.chaos.recorder import FleetRecorder, StepRecorder
from benchmarks.quickstart_run import PROBE_TOLERANCE, PROMPT_TOKENS, RESPONSE_TOKENS, policy_of
from benchmarks.runs import quiet_trainer
from lrl.callbacks import Evaluation, Throughput, WeightSync
from lrl.members.launchers import Given, Ray
from lrl.quickstart.task import correct

LAUNCHERS: dict[str, Any] = {"given": Given, "ray": Ray}


class AtTheEnd(Evaluation):
    """Greedy accuracy on the held-out problems after the last step, and only then."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pass

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        pass


def make_callbacks(settings: TargetSettings, folder: Path, rank: int) -> list[L.Callback]:
    """Returns the callbacks in the order in which they run after a step; Lightning puts the
    checkpoint last."""
    journal = Journal(folder / "journal.jsonl")
    if rank == 0:
        journal.write("launch")
    tolerance = PROBE_TOLERANCE["float32"]
    sync = WeightSync(deadline_s=settings.sync_deadline_s, probe_tolerance=tolerance)
    problems = lrl.Prompts("lrl.quickstart.task:held_out", name="held_out", shuffle=False)
    checkpoint = ModelCheckpoint(
        folder,
        save_top_k=0,
        save_last=True,
        every_n_train_steps=settings.checkpoint_every,
        enable_version_counter=False,
    )
    evaluation = [AtTheEnd(problems)] if settings.evaluate else []
    recorders = [FleetRecorder(journal), StepRecorder(journal, folder / "stop")]
    return [sync, Throughput(), *evaluation, *recorders, checkpoint]


def where(settings: TargetSettings) -> dict[str, Any]:
    server = lrl.ServerSettings(
        max_num_seqs=settings.capacity,
        dtype="float32",
        kv_cache_gib=0.5,
        extra_args=WITH_A_WORKER,
        host=settings.host or lrl.ServerSettings.host,
        insecure=bool(settings.host),
    )
    common: dict[str, Any] = {
        "server": server,
        "heartbeat_s": settings.heartbeat_s,
        "generator_timeout_s": 600.0,
        "join_port": JOIN_PORT if settings.host else 0,
    }
    if settings.second_node == "trainer":
        return {
            "devices": 2,
            "num_nodes": 2,
            "strategy": lrl.AsyncDDP(generator_devices=1, **common),
        }
    if settings.second_node:
        launcher = LAUNCHERS[settings.second_node](GENERATORS, **json.loads(settings.launcher))
        return {
            "devices": 1,
            "strategy": lrl.AsyncSingleDevice(generator_devices=0, launcher=launcher, **common),
        }
    return {
        "devices": 1 + GENERATORS,
        "strategy": lrl.AsyncSingleDevice(generator_devices=GENERATORS, **common),
    }


def make_data(settings: TargetSettings) -> lrl.RolloutDataModule:
    rows = settings.steps_per_epoch * settings.groups or None
    environment: Any = locate(settings.environment) if settings.environment else None
    return lrl.RolloutDataModule(
        prompts=lrl.Prompts("lrl.quickstart.task:problems", seed=settings.seed, limit=rows),
        rewards=[correct],
        groups_per_step=settings.groups,
        rollouts_per_group=settings.responses,
        max_lag=settings.max_lag,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
        micro_batch_tokens=8192,
        environment=None if environment is None else environment(),
    )


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.chaos.target")
    parser.add_class_arguments(TargetSettings)
    settings = TargetSettings(**vars(parser.parse_args()))
    folder = Path(settings.folder).resolve()
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
    if rank == 0:
        obey(folder)
    L.seed_everything(settings.seed, verbose=False)
    policy = lrl.PolicyModule(
        str(policy_of(settings.seed)),
        objective=lrl.objectives.AIPO(rho=4.0),
        lr=settings.lr,
        warmup_steps=10,
        schedule=settings.schedule,  # type: ignore[arg-type]
    )
    last = folder / "last.ckpt"
    trainer = quiet_trainer(
        settings.steps,
        folder,
        enable_checkpointing=True,
        callbacks=make_callbacks(settings, folder, rank),
        **where(settings),
    )
    trainer.fit(policy, make_data(settings), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
