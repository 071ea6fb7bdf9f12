"""The transport that writes files."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lrl.weights import shared_memory
from lrl.weights.shared_memory import SharedMemory
from lrl.weights.version_file import open_new
from tests.weights.whole_weights import WholeWeights


def weights_of(value: float) -> WholeWeights:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        # A view, as parameters may be.
        yield ("body", torch.full((4, 6), value, requires_grad=True).t())
        yield "head", torch.full((3,), value, dtype=torch.bfloat16)

    return WholeWeights(weights)


@pytest.fixture
def connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[SharedMemory, Path]:
    """The transport, and the folder in the place of shared memory."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    return SharedMemory(weights_of(0.0), "run-0"), tmp_path


def stage(transport: SharedMemory, value: float) -> None:
    transport.policy = weights_of(value)
    transport.stage()


def staged_in(shared: Path) -> Path:
    """Returns the only file there; raises ValueError if there is another number of them."""
    (file,) = shared.glob("lrl-run-0-*/*")
    return file


def test_a_reader_of_the_older_file_reads_all_of_it(connected: tuple[SharedMemory, Path]) -> None:
    transport, shared = connected
    stage(transport, 1.0)
    with staged_in(shared).open("rb") as reader:
        begun, old = reader.read(10), staged_in(shared).read_bytes()
        stage(transport, 2.0)
        assert begun + reader.read() == old
    assert load_file(staged_in(shared))["head"].tolist() == [2.0] * 3


def test_no_other_user_can_guess_open_or_redirect_the_file_that_generators_load(
    connected: tuple[SharedMemory, Path], tmp_path: Path
) -> None:
    transport, shared = connected
    treasure = tmp_path / "treasure"
    treasure.write_text("mine")
    for name in ("lrl-run-0.safetensors", "lrl-run-0.draft", "lrl-run-0-weights.safetensors"):
        (shared / name).symlink_to(treasure)
    stage(transport, 1.0)
    stage(transport, 2.0)
    file = staged_in(shared)
    assert treasure.read_text() == "mine" and not file.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    first = file.parent.name
    stage(transport, 3.0)
    assert staged_in(shared).parent.name != first


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to])
def test_a_file_that_is_there_already_is_not_written(plant: Any, tmp_path: Path) -> None:
    treasure, file = tmp_path / "treasure", tmp_path / "weights.safetensors"
    treasure.write_text("mine")
    plant(file, treasure)
    with pytest.raises(FileExistsError):
        open_new(file)
    assert treasure.read_text() == "mine"


def test_closing_removes_the_file_and_may_be_repeated(connected: tuple[SharedMemory, Path]) -> None:
    transport, shared = connected
    stage(transport, 1.0)
    transport.close()
    transport.close()
    assert list(shared.iterdir()) == []
    SharedMemory(weights_of(0.0), "run-0").close()


def test_without_room_nothing_is_left_and_the_older_version_stays(
    connected: tuple[SharedMemory, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, shared = connected
    stage(transport, 1.0)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=64))
    with pytest.raises(OSError, match="GiB free and the weights take .* Enlarge it"):
        stage(transport, 2.0)
    assert load_file(staged_in(shared))["head"].tolist() == [1.0] * 3
