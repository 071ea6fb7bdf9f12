"""Functions of a user's code are imported by module and by file; rooms import a name at its first
use."""

from __future__ import annotations

import pickle
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lrl.system import imports


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("by_name_scores", None)
    (tmp_path / "by_name_scores.py").write_text(
        "def short(prompt, response, **columns):\n    return 1.0\nLIMIT = 3\n"
    )
    return tmp_path


def test_a_module_of_the_current_folder_and_a_file_give_the_same_function(here: Path) -> None:
    forms = ("by_name_scores:short", "by_name_scores.short", "./by_name_scores.py:short")
    found = [imports.function(name) for name in (*forms, f"{here}/by_name_scores.py:short")]
    assert all(one is found[0] for one in found)
    assert pickle.loads(pickle.dumps(found[0])) is found[0], "as a reward travels"
    (here / "inner").mkdir()
    (here / "inner" / "by_name_inner.py").write_text("def rows():\n    return []\n")
    assert imports.function("inner/by_name_inner.py:rows")() == []


def test_a_file_of_the_current_folder_never_takes_the_place_of_an_installed_module(
    here: Path,
) -> None:
    (here / "wave.py").write_text("def ride():\n    return 1\n")
    sys.modules.pop("wave", None)
    assert imports.function("wave:open").__module__ == "wave"
    with pytest.raises(ValueError, match="another module has its name"):
        imports.function("./wave.py:ride")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("by_name_scores:shrot", r"by_name_scores.py has no 'shrot'. Did you mean short\?"),
        ("by_name_scorse:short", "No module named 'by_name_scorse'"),
        ("by_name_scorse.py:short", "there is no file 'by_name_scorse.py'"),
        ("by_name_scores:LIMIT", "is a int, not a function"),
        ("short", "Empty module name"),
        ("by_name_broken:f", r"SyntaxError: .*by_name_broken.py, line 1\)"),
    ],
)
def test_an_error_names_the_missing_part_and_a_similar_name(
    name: str, message: str, here: Path
) -> None:
    (here / "by_name_broken.py").write_text("def f(:\n")
    with pytest.raises(ValueError, match=message):
        imports.function(name)


@pytest.mark.parametrize("room", imports.ROOMS)
def test_every_name_of_a_room_is_listed_and_can_be_imported(room: str) -> None:
    module = import_module(room)
    assert set(dir(module)) >= set(module.__all__), "Tab completes what `dir` lists"
    for name in module.__all__:
        assert getattr(module, name) is not None
