"""A reader finds the tests of a library file in one guess: those of `lrl/rewards/pool.py` are in
`tests/rewards/test_pool.py`. Otherwise one test file has its name at the end of its docstring, as
`Covers lrl/workers/remote.py, worker.py.`"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from tests import test_words
from tests.test_words import ROOT

LIBRARY = {path.relative_to(ROOT) for path in test_words.LIBRARY if path.name != "__init__.py"}
TESTS = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
SHORT = 60
"""Nobody has to name a file of fewer lines: its tests may be where those of the file that it serves
are."""
WHOLE = ("benchmarks", "runs", "standin_cuda", "strategies")
ANY_NAME = {Path("tests"), *(Path("tests", name) for name in WHOLE)}
"""Folders of house rules, benchmarks and whole runs: these tests may have no library file."""


def mirrored(library_file: Path) -> Path:
    """The test file of the same stem, in the same folder under tests/."""
    *folders, name = library_file.parts
    if folders[0] == "lrl":
        del folders[0]
    return Path("tests", *folders, f"test_{name}")


def covered_by(test: Path) -> list[Path]:
    """The library files that a test file's docstring names at its end. A name without a folder has
    the folder of the name before."""
    docstring = ast.get_docstring(ast.parse((ROOT / test).read_text())) or ""
    sentence = re.search(r"^Covers ([\w/.,\s]+)\.\Z", docstring, re.MULTILINE)
    found, folder = [], Path()
    for name in re.split(r",\s", sentence[1]) if sentence else []:
        if "/" in name:
            folder = Path(name).parent
        found.append(folder / Path(name).name)
    return found


def test_every_file_of_the_library_has_one_place_for_its_tests() -> None:
    named = Counter(path for test in TESTS for path in covered_by(test))
    assert set(named) - LIBRARY == set(), "there is no such file"
    elsewhere = {path for path in LIBRARY if mirrored(path) not in TESTS}
    twice = {path for path in elsewhere if named[path] > 1}
    assert twice == set(), "name it in one test file alone"
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in elsewhere}
    nowhere = {path for path in elsewhere if lines[path] >= SHORT and not named[path]}
    assert nowhere == set(), "name the test file after it, or it in the docstring of a test file"


def test_every_test_file_says_what_it_tests() -> None:
    own = {mirrored(path) for path in LIBRARY}
    others = {test for test in TESTS - own if test.parent not in ANY_NAME}
    silent = {test for test in others if not covered_by(test)}
    assert silent == set(), "name it after a file of the library, or such a file in its docstring"
