"""Wheels that are packed into pieces here are the same files when they are unpacked elsewhere."""

from __future__ import annotations

import random
import struct
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


def carried(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """Packs two wheels into pieces of 4 kB; returns their folder and the files that must come
    out."""
    noise = random.Random(1)
    files = {f"first/{i}.bin": noise.randbytes(5000) for i in range(4)}
    one = wheel(folder, "first", {**files, "first-1.0.data/scripts/run": b"#!python"})
    two = wheel(folder, "second", {"second-1.0.data/purelib/second.py": b"x = 1\n" * 900})
    pieces = folder / "carried"
    pieces.mkdir()
    packed = pack.pack("made_up", [one, two], pieces, piece_bytes=4000, preset=0, whole=False)
    assert len(packed) > 5
    assert max(piece.stat().st_size for piece in packed) <= 4000
    return pieces, {**files, "second.py": b"x = 1\n" * 900}


def test_unpacked_files_are_those_of_the_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "CHUNK", 2**13)
    pieces, expected = carried(tmp_path)
    site = tmp_path / "site"
    unpack.unpack(pieces, site)
    found = [path for path in site.rglob("*") if path.is_file()]
    assert {str(path.relative_to(site)): path.read_bytes() for path in found} == expected


def test_each_missing_and_each_damaged_piece_is_named(tmp_path: Path) -> None:
    pieces, _ = carried(tmp_path)
    (pieces / "made_up.2.xz").unlink()
    (pieces / "made_up.3.xz").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"made_up\.2\.xz is missing; .*made_up\.3\.xz is damaged"):
        unpack.unpack(pieces, tmp_path / "site")


def test_every_package_of_a_set_is_pinned() -> None:
    for names in pack.SETS.values():
        assert all("==" in requirement for requirement in pack.requirements(names))


def kernel(kind: int, made_for: int) -> bytes:
    """An entry of a section of kernels: a head of 64 bytes and 8 of code."""
    return struct.pack("<HHIQ12xI32x", kind, 0x101, 64, 8, made_for) + b"KERNEL%02d" % kind


def elf(sections: dict[str, tuple[bool, bytes]]) -> bytearray:
    """A library that has nothing but these sections: whether each is loaded, and its bytes."""
    names = b"\0".join(name.encode() for name in [*sections, ".shstrtab"]) + b"\0"
    body, table = b"\x7fELF\x02".ljust(64, b"\0"), b""
    for name, (loaded, data) in {**sections, ".shstrtab": (False, names)}.items():
        at = names.index(name.encode() + b"\0")
        table += struct.pack("<IIQQQQ24x", at, 1, 2 * loaded, 0, len(body), len(data))
        body += data
    library = bytearray(body + table)
    struct.pack_into("<Q", library, 40, len(body))
    struct.pack_into("<HHH", library, 58, 64, len(sections) + 1, len(sections))
    return library


def test_only_what_a_hopper_loads_stays_in_a_library() -> None:
    kept = kernel(2, 90) + kernel(pack.PTX, 80)
    foreign = kernel(2, 80) + kernel(2, 100) + kernel(pack.PTX, 120)
    head = struct.pack("<IHHQ", pack.FATBIN, 1, 16, len(kept + foreign))
    sections = {".text": (True, b"code"), ".debug": (False, b"names")}
    library = elf({**sections, ".nv_fatbin": (True, bytes(8) + head + foreign + kept)})
    whole = bytes(library)
    pack.blank(library)
    assert len(library) == len(whole)
    assert library.count(b"KERNEL") == 2 and kept in library
    assert b"code" in library and b"names" not in library
    assert [name for name, *_ in pack.sections(library)] == [*sections, ".nv_fatbin", ".shstrtab"]


def test_the_plugin_is_found_where_lrl_is_not_installed(tmp_path: Path) -> None:
    unpack.link_clone(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    (plugin,) = found.entry_points.select(group="vllm.general_plugins")
    assert plugin.value == "lrl.vllm_plugin.plugin:register"
    assert (tmp_path / "lrl" / "callbacks" / "__init__.py").exists()
