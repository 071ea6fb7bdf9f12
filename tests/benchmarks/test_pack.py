"""Wheels that are packed into pieces here are the same files when they are unpacked elsewhere."""

from __future__ import annotations

import random
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from benchmarks.gpu import pack, unpack


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """Writes a made-up wheel."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.mkdir(name)
        for file, data in files.items():
            archive.writestr(file, data)
    return path


def test_unpacked_files_are_those_of_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "CHUNK", 2**13)
    noise = random.Random(1)
    files = {f"first/{i}.bin": noise.randbytes(5000) for i in range(4)}
    one = wheel(tmp_path, "first", {**files, "first-1.0.data/scripts/run": b"#!python"})
    two = wheel(tmp_path, "second", {"second-1.0.data/purelib/second.py": b"x = 1\n" * 900})
    pieces = tmp_path / "carried"
    pieces.mkdir()
    packed = pack.pack("made_up", [one, two], pieces, piece_bytes=4000, preset=0, whole=False)
    assert max(piece.stat().st_size for piece in packed) <= 4000
    expected = {**files, "second.py": b"x = 1\n" * 900}
    site = tmp_path / "site"
    unpack.unpack(pieces, site)
    found = [path for path in site.rglob("*") if path.is_file()]
    assert {str(path.relative_to(site)): path.read_bytes() for path in found} == expected


def test_the_plugin_is_found_where_lrl_is_not_installed(tmp_path: Path) -> None:
    unpack.link_clone(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    (plugin,) = found.entry_points.select(group="vllm.general_plugins")
    assert plugin.value == "lrl.vllm_plugin.plugin:register"
    assert (tmp_path / "lrl" / "callbacks" / "__init__.py").exists()
