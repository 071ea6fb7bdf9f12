"""A checkpoint in parts begins on all ranks together, or on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lrl.checkpoints import checkpoint_folder
from lrl.checkpoints.checkpoint_file import UNFINISHED
from lrl.checkpoints.checkpoint_folder import CheckpointFolder


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(path: Path) -> CheckpointFolder:
    folder = CheckpointFolder()
    folder.save_checkpoint({"global_step": 3, "state_dict": {"weight": torch.ones(2)}}, path)
    return folder


def test_what_a_killed_run_has_left_is_gone_before_any_rank_writes(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f"step{UNFINISHED}"
    left.mkdir()
    (left / "part").write_text("of a killed run")
    agreed = []
    shared, saved = dist.broadcast_object_list, checkpoint_folder.save_parts

    def share(*objects: Any, **how: Any) -> None:
        agreed.append(left.exists())
        shared(*objects, **how)

    def parts(*arguments: Any) -> None:
        assert agreed == [False], "the ranks have met after the removal"
        saved(*arguments)

    monkeypatch.setattr(dist, "broadcast_object_list", share)
    monkeypatch.setattr(checkpoint_folder, "save_parts", parts)
    assert save(tmp_path / "step").newest_step == 3
