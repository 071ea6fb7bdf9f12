"""Atomic checkpoint files: a full disk costs neither the run nor its last checkpoint. What one can
hold, against `torch.load` itself; and runs whose own parts have other state."""

from __future__ import annotations

import datetime
import multiprocessing
import resource
import time
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lrl.checkpoints.checkpoint_file import UNFINISHED, CheckpointFile, is_readable, readable_part
from tests.checkpoints.through_files import through_a_file
from tests.leftovers import wait_for
from tests.run_without_generators import fit, trainer

KILLS = 8


def save_for_ever(path: Path) -> None:
    checkpoint: dict[str, Any] = {"global_step": 0, "weights": torch.zeros(4_000_000)}
    while True:
        CheckpointFile().save_checkpoint(checkpoint, path)
        checkpoint["global_step"] += 1
        checkpoint["weights"] += 1


def limit_files(free: int | None) -> None:
    """Limits the files of this process to so many bytes: an OSError, as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if free is None else free, hard))


class FullDisk(L.Callback):
    """Has a rank's disk full during some steps; after the last one there is room."""

    def __init__(self, steps: range, rank: int = 0, free: int = 100_000) -> None:
        self.steps = steps
        self.rank = rank
        self.free = free

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        full = trainer.global_rank == self.rank and trainer.global_step in self.steps
        limit_files(self.free if full else None)

    def on_train_end(self, *args: Any) -> None:
        limit_files(None)


def test_a_run_killed_while_it_writes_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    unfinished, torn = path.with_name(path.name + UNFINISHED), 0
    for _ in range(KILLS):
        process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path,))
        process.start()
        wait_for(path.exists, 30.0, "a first checkpoint")
        deadline = time.monotonic() + 30.0
        while not unfinished.exists() and time.monotonic() < deadline:
            time.sleep(0.0005)
        process.kill()
        process.join()
        torn += unfinished.exists()
        found = torch.load(path, weights_only=True)
        assert torch.equal(found["weights"], torch.full((4_000_000,), float(found["global_step"])))
    assert torn, "no kill met a file that was being written"


def test_a_run_on_a_full_disk_keeps_its_last_good_checkpoint_until_there_is_a_newer_one(
    policy: str, tmp_path: Path
) -> None:
    found: list[list[str]] = []

    class Look(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            found.append(sorted(path.name for path in (tmp_path / "checkpoints").glob("*")))

    newest_only = ModelCheckpoint(
        dirpath=tmp_path / "checkpoints", filename="{step}", every_n_train_steps=1
    )
    fit(policy, trainer(tmp_path, FullDisk(range(2, 4)), Look(), newest_only, max_steps=6))
    kept = [["step=2.ckpt"]] * 3
    assert found == [[], ["step=1.ckpt"], *kept, ["step=5.ckpt"]]


def test_a_plugin_of_the_users_own_is_left_in_its_place(policy: str, tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    own = AsyncCheckpointIO()
    settings = {"logger": False, "default_root_dir": tmp_path}
    strategy = trainer(tmp_path).strategy
    running = L.Trainer(strategy=strategy, plugins=[own], max_steps=2, **settings)
    assert isinstance(running.strategy, SingleDeviceStrategy)
    fit(policy, running)
    assert running.strategy.checkpoint_io is own
    assert list(tmp_path.glob("**/*.ckpt"))


@dataclass
class Own:
    number: int = 1


PLAIN: dict[str, Any] = {
    "numbers": [0, 1.5, True, None, 1 + 2j, 10**30],
    "text": ["", "\u00e9", b"bytes"],
    "tensors": [torch.zeros(2), torch.nn.Parameter(torch.ones(1))],
    "of tensors": [torch.Size([1]), torch.float32, torch.device("cpu")],
    "nested": OrderedDict(a={(1, 2): [{"b": {1, 2}}]}),
    "counted": Counter("aab"),
}
ODD = {
    "a time": datetime.datetime(2026, 1, 2),
    "a number of numpy": np.float64(1.5),
    "an array": np.zeros(2),
    "a path": Path("a"),
    "a decimal": Decimal("1.5"),
    "an object": Own(),
    "a function that cannot be pickled": lambda: None,
    "a default": defaultdict(list, a=[1]),
    "a queue": deque([1]),
}


def test_what_is_called_readable_is_what_torch_reads() -> None:
    assert is_readable(PLAIN)
    assert through_a_file(PLAIN).keys() == PLAIN.keys()
    for name, value in ODD.items():
        try:
            through_a_file({"value": value})
            reads = True
        except Exception:  # noqa: BLE001
            reads = False
        assert is_readable(value) == reads, name
    with torch.serialization.safe_globals([Own]):  # the user has allowed it
        assert is_readable({"own": Own()})


def test_what_cannot_be_read_is_left_out_whole_and_named(caplog: pytest.LogCaptureFixture) -> None:
    callbacks = {"Own": {"deep": [1, {"at": Own()}], "count": 3}, "Other": {"count": 4}}
    kept = {"state_dict": OrderedDict(w=torch.zeros(1)), "global_step": 7}
    weights = OrderedDict(kept["state_dict"], _extra_state=Own())
    own = {"callbacks": callbacks, "mine": [Own()], "state_dict": weights}
    whole = readable_part(kept | own)
    assert "without state_dict._extra_state, callbacks.Own, mine. Only" in caplog.text
    assert whole == kept | {"callbacks": {"Other": {"count": 4}}}
    assert "Own" in callbacks, "the state of the run itself is as before"
    through_a_file(whole)
