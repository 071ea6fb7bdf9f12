"""The errors of lrl are one tree, and its drawing shows each of them."""

from __future__ import annotations

import ast
import inspect
import re

import lrl.errors
from tests.test_imports import ROOT, modules

PRIVATE = {
    "Gone",
    "BadCallError",
    "Deadlock",
    "JoinEnded",
    "NotListeningError",
    "NotSent",
    "OutOfTimeError",
    "Refusal",
    "RequestError",
    "RunEnded",
    "Stopped",
    "TooLargeError",
}
"""Errors that never leave the room that raises them."""


def drawn() -> dict[str, str]:
    """Each error of the drawing with the one above it."""
    above: list[str] = []
    found = {}
    for line in (lrl.errors.__doc__ or "").splitlines():
        name = re.fullmatch(r"    ([│ ]*)(?:[├└]── )?(\w+Error|\w+)(?: \(\w+\))?(?:  .*)?", line)
        if name is None or not hasattr(lrl.errors, name[2]):
            continue
        depth = (line.index(name[2]) - 4) // 4
        above[depth:] = [name[2]]
        found[name[2]] = above[depth - 1] if depth else "Exception"
    return found


def test_the_drawing_of_the_errors_is_their_tree() -> None:
    classes = [one for _, one in inspect.getmembers(lrl.errors, inspect.isclass)]
    tree = {one.__name__: one.__bases__[0].__name__ for one in classes}
    assert len(tree) > 20 and drawn() == tree


def test_an_error_that_leaves_its_room_is_in_the_tree() -> None:
    known = {name for name, _ in inspect.getmembers(lrl.errors, inspect.isclass)}
    outside = set()
    for name, path in modules(ROOT).items():
        if name == "lrl.errors":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(map(is_error, node.bases)):
                outside.add(node.name)
    assert outside == PRIVATE and not outside & known


def is_error(base: ast.expr) -> bool:
    """Whether a class with this base is an error, by the name of the base."""
    name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
    return name.endswith(("Error", "Exception")) or hasattr(lrl.errors, name)
