"""Retired words stay away, and every call and attribute of the library is easy to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = [path for folder in ("lrl", "callbacks") for path in (ROOT / folder).rglob("*.py")]
TEXTS = [
    *LIBRARY,
    *(ROOT / "tests").rglob("*.py"),
    *(ROOT / "benchmarks").rglob("*.py"),
    *(ROOT / "recipes").rglob("*.yaml"),
    *(ROOT / "docs").glob("*.md"),
    *ROOT.glob("*.md"),
]
RETIRED = re.compile(
    r"\b(crews?|make_crew|keepers?|receptions?|hindsight|roll calls?|reward hosts?|who fits"
    r"|(is|are) told to|goes on|lrl serve|lrl score)\b",
    re.IGNORECASE,
)
"""Words with two meanings, or with none in the field. docs/architecture.md has the words instead."""
MAX_UNNAMED = 4


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Every node of the library, and its place."""
    for path in LIBRARY:
        for node in ast.walk(ast.parse(path.read_text())):
            yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node


def has_many_unnamed(node: ast.AST) -> bool:
    """Whether it is a call with arguments that a reader has to count; a log line's are its text."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return False
    unpacked = sum(isinstance(argument, ast.Starred) for argument in node.args)
    many = len(node.args) > MAX_UNNAMED or unpacked > 1
    return many and not ast.unparse(node.func).startswith("log.")


def sets_several_attributes(node: ast.AST) -> bool:
    """Whether it sets several attributes in one line, other than to both results of one call."""
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
        return False
    attributes = sum(isinstance(target, ast.Attribute) for target in node.targets[0].elts)
    return attributes > 1 and (attributes > 2 or isinstance(node.value, ast.Tuple))


def test_no_retired_word_comes_back() -> None:
    found = []
    for path in TEXTS:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if path != Path(__file__) and (match := RETIRED.search(line)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


def test_a_call_names_its_arguments_and_an_attribute_has_a_line_of_its_own() -> None:
    unnamed, at_once = [], []
    for place, node in nodes():
        unnamed += [place] * has_many_unnamed(node)
        at_once += [place] * sets_several_attributes(node)
    assert (unnamed, at_once) == ([], [])
