"""Functions of a user's code are imported by module and by file, with helpful errors."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from lrl.system import import_by_name


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "by_name_scores.py").write_text(
        "def short(prompt, response, **columns):\n    return 1.0\nLIMIT = 3\n"
    )
    return tmp_path


@pytest.fixture(autouse=True)
def forget() -> None:
    """Forgets a module of another test's folder."""
    sys.modules.pop("by_name_scores", None)


def test_a_module_of_the_current_folder_and_a_file_give_the_same_function(here: Path) -> None:
    forms = (
        "by_name_scores:short",
        "by_name_scores.short",
        "by_name_scores.py:short",
        "./by_name_scores.py:short",
    )
    found = [import_by_name.function(name) for name in (*forms, f"{here}/by_name_scores.py:short")]
    assert all(one is found[0] for one in found)
    assert pickle.loads(pickle.dumps(found[0])) is found[0], (
        "by its module's name, as a reward travels"
    )


def test_a_file_of_another_folder_is_found_there(here: Path) -> None:
    (here / "inner").mkdir()
    (here / "inner" / "by_name_inner.py").write_text("def rows():\n    return []\n")
    assert import_by_name.function("inner/by_name_inner.py:rows")() == []


def test_a_file_of_the_current_folder_never_takes_the_place_of_an_installed_module(
    here: Path,
) -> None:
    (here / "wave.py").write_text("def ride():\n    return 1\n")
    sys.modules.pop("wave", None)
    assert import_by_name.function("wave:open").__module__ == "wave"
    with pytest.raises(ValueError, match="wave.py has no 'ride'"):
        import_by_name.function("wave:ride")
    with pytest.raises(ValueError, match="another module has its name"):
        import_by_name.function("./wave.py:ride")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("by_name_scores:shrot", r"by_name_scores.py has no 'shrot'. Did you mean short?"),
        ("by_name_scorse:short", "No module named 'by_name_scorse'. Write module:function"),
        ("by_name_scorse.py:short", "there is no file 'by_name_scorse.py'"),
        ("by_name_scores:LIMIT", "is a int, not a function"),
        ("short", "Empty module name"),
        ("json.py:loads", "another module has its name"),
        ("by_name_broken:f", r"SyntaxError: .*by_name_broken.py, line 1\)"),
        ("by_name_lacks:f", r"by_name_lacks cannot be imported: .*no_such_thing"),
    ],
)
def test_an_error_names_the_missing_part_and_a_similar_name(
    name: str, message: str, here: Path
) -> None:
    files = {
        "by_name_broken.py": "def f(:\n",
        "by_name_lacks.py": "import no_such_thing\n",
        "json.py": "def loads():\n    return 1\n",
    }
    for file, text in files.items():
        (here / file).write_text(text)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        import_by_name.function(name)
