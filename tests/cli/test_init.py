"""A project that `lrl init` writes works as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lrl.cli.init import TURNS_MARK
from lrl.cli.main import main as lrl
from tests.cli.conftest import Say


@pytest.fixture(params=[[], ["--turns"]], ids=["plain", "turns"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    assert lrl(["init", str(tmp_path / "my_run"), *request.param]) == 0
    return tmp_path / "my_run"


def test_its_settings_and_its_data_are_what_a_run_takes(
    project: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    status, out, _ = say("fit", "--config", "recipe.yaml", "--print_config")
    made = yaml.safe_load(out)
    assert status == 0
    has_environment = (project / "environment.py").exists()
    assert (made["data"]["init_args"]["environment"] is not None) == has_environment
    assert made["trainer"]["logger"]["init_args"]["name"] == "my_run"


def test_its_tests_pass_and_nothing_of_the_template_is_left(project: Path) -> None:
    for file in project.iterdir():
        text = file.read_text()
        assert "NAME" not in text and TURNS_MARK not in text
    named = set((project / "README.md").read_text().split("`"))
    assert {file.name for file in project.iterdir()} - named == {"README.md"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_a_name_that_is_none_is_refused_and_nothing_that_is_there_is_written_over(
    tmp_path: Path, say: Say
) -> None:
    for name in ("my run", "-x", ".hidden"):
        status, _, error = say("init", "--", tmp_path / name)
        assert status == 2 and "is no name of a run" in error
    (tmp_path / "rewards.py").write_text("mine")
    status, _, error = say("init", tmp_path)
    assert status == 2 and "exists and is not empty. Name a new folder" in error
    assert [file.name for file in tmp_path.iterdir()] == ["rewards.py"]
