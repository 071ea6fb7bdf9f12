"""The difference of two versions of a file of weights."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lrl.errors import DamagedDelta
from lrl.weights import delta
from lrl.weights.delta import apply_delta, write_delta
from lrl.weights.staged_file import checksum

SIZE = 5000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "PIECE", 1024)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "old").write_bytes(os.urandom(SIZE))
    return tmp_path / "old"


def changed(old: Path, places: list[int]) -> Path:
    content = bytearray(old.read_bytes())
    for place in places:
        content[place] ^= 5
    new = old.with_name("new")
    new.write_bytes(content)
    return new


@pytest.mark.parametrize("size", [SIZE, SIZE + 1])
@pytest.mark.parametrize(
    "places", [[], [0], [SIZE - 1], [1023, 1024, 1025], list(range(0, SIZE, 40))]
)
def test_a_delta_makes_of_the_older_file_exactly_the_newer_one(
    places: list[int], size: int, old: Path, tmp_path: Path
) -> None:
    old.write_bytes(os.urandom(size))
    new, made = changed(old, places), io.BytesIO()
    assert write_delta(old, new, tmp_path / "delta")
    assert apply_delta(old, tmp_path / "delta", made) == checksum(new)
    assert made.getvalue() == new.read_bytes() and (tmp_path / "delta").stat().st_size < SIZE / 2


@pytest.mark.parametrize(
    "words",
    [
        [],
        [0],
        [65_535, 65_536],
        [65_535, 131_072, 299_999],
        [200_000],
        list(range(0, 300_000, 7)),
        [*range(2000)],
    ],
)
def test_words_that_differ_are_found_again_in_every_row(words: list[int]) -> None:
    before = np.random.default_rng(0).integers(0, 2**16, 300_000, np.uint16)
    after = before.copy()
    after[words] ^= np.random.default_rng(1).integers(1, 2**16, len(words), np.uint16)
    small = delta.compressed(before.view(np.uint8), after.view(np.uint8))
    assert (delta.restored(before.view(np.uint8), small) == after.view(np.uint8)).all()
    with pytest.raises((ValueError, IndexError)):
        delta.restored(before[:100_000].view(np.uint8), small)


def test_one_small_step_in_bfloat16_is_a_few_hundredths_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "PIECE", 2**20)
    torch.manual_seed(0)
    weight = torch.nn.Parameter(0.02 * torch.randn(1024, 1024))
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    for name in ("old", "new"):
        save_file({"weight": weight.detach().bfloat16()}, tmp_path / name)
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    assert write_delta(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    assert (tmp_path / "delta").stat().st_size < 0.03 * (tmp_path / "new").stat().st_size


@pytest.mark.parametrize("content", [os.urandom(SIZE), os.urandom(SIZE + 1)])
def test_a_delta_that_is_no_smaller_or_of_another_model_is_not_made(
    content: bytes, old: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").write_bytes(content)
    assert not write_delta(old, tmp_path / "new", tmp_path / "delta")


def test_a_delta_that_cannot_be_written_says_why(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*parts: object) -> bytes:
        raise OSError("No space left on device")

    monkeypatch.setattr(delta, "compressed", full)
    with pytest.raises(OSError, match="No space left"):
        write_delta(old, changed(old, [7]), tmp_path / "delta")


def test_a_delta_that_is_damaged_or_of_another_length_is_refused(old: Path, tmp_path: Path) -> None:
    file = tmp_path / "delta"
    write_delta(old, changed(old, [7, 2000]), file)
    whole = file.read_bytes()
    damaged = np.frombuffer(whole, np.uint8).copy()
    damaged[delta.LENGTH.size + 4] ^= 255
    wrong = {
        "cut": whole[:-1],
        "half": whole[: len(whole) // 2],
        "twice": whole * 2,
        "bits": damaged.tobytes(),
    }
    for name, content in wrong.items():
        file.write_bytes(content)
        with pytest.raises(DamagedDelta):
            apply_delta(old, file, io.BytesIO())
            raise AssertionError(name)


def test_a_run_that_ends_ends_the_making_of_a_delta(old: Path, tmp_path: Path) -> None:
    def told() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_delta(old, changed(old, [7]), tmp_path / "delta", told)
