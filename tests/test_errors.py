"""The errors of lrl are one tree."""

from __future__ import annotations

import ast
import inspect

import lrl.errors
from tests.test_imports import ROOT, modules

PRIVATE = {
    "Gone",
    "BadCallError",
    "Deadlock",
    "JoinEnded",
    "RunEnded",
    "TooMuchError",
    "_Tried",
}
"""Errors that never leave the room that raises them."""


def test_an_error_that_leaves_its_room_is_in_the_tree() -> None:
    classes = dict(inspect.getmembers(lrl.errors, inspect.isclass))
    known = set(classes)
    assert all(issubclass(one, lrl.errors.LrlError) for one in classes.values())
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
