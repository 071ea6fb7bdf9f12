"""A run whose agents play elsewhere, with the server of another process: a test kills it and starts
it again.

Arguments: policy folder, run folder, port for agents, steps, and where the server is, as JSON. It
saves at every step, and resumes from what is there. It writes a line for each step that it trains.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

import lrl
from benchmarks.runs import quiet_trainer
from lrl.callbacks import WeightSync
from lrl.environments import Agent
from lrl.run import Run
from lrl.system.endpoint import Location
from tests.lent_server import end_half_sync
from tests.strategies.run_of_ranks import ServerElsewhere

GROUPS, RESPONSES = 2, 3


class BorrowingElsewhere(lrl.AsyncSingleDevice):
    """A strategy with that server in the place of its own."""

    def __init__(self, where: dict[str, str]) -> None:
        super().__init__()
        self.where = where
        # A killed run leaves its file of weights: the server's supervisor removes it.
        self.run_id = where["run_id"]

    def make_servers(self, run: Run) -> list[Any]:
        """See `GeneratorDevices.make_servers`."""
        end_half_sync(self.where["url"], self.where["token"])
        settings = lrl.ServerSettings(max_model_len=512, max_num_seqs=32, dtype="float32")
        return [ServerElsewhere(0, Location(self.where["url"]), self.where["token"], settings)]


class Telling(L.Callback):
    """Writes a line for each step, before it is saved."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        groups = trainer.datamodule.run.step_stream.groups  # type: ignore[attr-defined]
        line = {
            "step": trainer.global_step,
            "prompts": [group.prompt.id for group in groups],
            "failures": [one.failure for group in groups for one in group.rollouts if one.failure],
            "turns": [len(one.turns) for group in groups for one in group.rollouts],
        }
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(policy: str, run_folder: str, port: str, steps: str, where: str) -> None:
    folder = Path(run_folder)
    saved = folder / "checkpoints" / "last.ckpt"
    trainer = quiet_trainer(
        int(steps),
        folder,
        devices=2,
        strategy=BorrowingElsewhere(json.loads(where)),
        callbacks=[
            WeightSync(),
            Telling(folder / "steps.jsonl"),
            ModelCheckpoint(saved.parent, every_n_train_steps=1, save_last=True),
        ],
        enable_checkpointing=True,
    )
    agents = Agent(port=int(port))
    agents.stop = tuple(string.ascii_letters)  # else a turn of this policy has hundreds of tokens
    data = lrl.RolloutDataModule(
        [{"prompt": f"{n}+1="} for n in range(10, 10 + GROUPS * int(steps))],
        groups_per_step=GROUPS,
        rollouts_per_group=RESPONSES,
        max_lag=1,
        max_prompt_tokens=64,
        max_response_tokens=400,
        max_turn_tokens=128,
        environment=agents,
        max_reward_failures=1.0,
    )
    resumed = str(saved) if saved.exists() else None
    trainer.fit(lrl.PolicyModule(policy, lr=1e-3), data, ckpt_path=resumed)
