"""A checkpoint in parts is written over what a killed run has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrl.checkpoints.checkpoint_file import UNFINISHED
from lrl.checkpoints.checkpoint_folder import CheckpointFolder, read_weights


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_rest_of_a_killed_run_is_overwritten(alone: None, tmp_path: Path) -> None:
    path, left = tmp_path / "step", tmp_path / f"step{UNFINISHED}"
    for number in range(2):
        checkpoint = {"global_step": 3, "state_dict": {"weight": torch.full((2,), float(number))}}
        CheckpointFolder().save_checkpoint(checkpoint, path)
        assert read_weights(path)["weight"].tolist() == [number, number]
        path.rename(left)
