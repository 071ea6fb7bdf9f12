"""The errors of lrl are one tree; a setting that takes one of a few words refuses all others."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal

import pytest

import lrl
import lrl.errors
from lrl.errors import ConfigError
from tests.test_imports import ROOT, modules

PRIVATE = {
    "Gone",
    "Deadlock",
    "JoinEnded",
    "RunEnded",
    "TooMuchError",
    "_Tried",
}
"""Errors that never leave the room that raises them."""


def test_an_error_that_leaves_its_room_is_in_the_tree() -> None:
    classes = inspect.getmembers(lrl.errors, inspect.isclass)
    own = {name: one for name, one in classes if one.__module__ == "lrl.errors"}
    assert all(issubclass(one, lrl.errors.LrlError) for one in own.values())
    outside = set()
    for name, path in modules(ROOT).items():
        if name == "lrl.errors":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(map(is_error, node.bases)):
                outside.add(node.name)
    assert outside == PRIVATE and not outside & set(own)


def is_error(base: ast.expr) -> bool:
    """Whether a class with this base is an error, by the name of the base."""
    name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
    return name.endswith(("Error", "Exception")) or hasattr(lrl.errors, name)


PLACES = [lrl] + [
    import_module(f"lrl.{name}")
    for name in (
        *("advantages", "callbacks", "environments", "objectives", "rewards", "routing.dispatch"),
        "strategies",
    )
]
NEEDED: dict[str, Any] = {
    "model": "lrl.quickstart.warmup:policy",
    "prompts": [{"prompt": "1+1="}],
    "rewards": lrl.rewards.ExactMatch(),
    "source": [{"prompt": "1+1="}],
    "tasks": "leg_counting",
    "jobs": 1,
    "template": "{response}",
}
"""What classes need besides."""


def settings_of_words() -> Iterator[tuple[type, str]]:
    """Each public class with a setting that takes words, and the setting."""
    found: set[type] = set()
    for place in PLACES:
        for name in getattr(place, "__all__", dir(place)):
            one = getattr(place, name)
            if inspect.isclass(one) and one.__module__.startswith("lrl"):
                found.add(one)
    for kind in sorted(found, key=lambda kind: kind.__qualname__):
        hints = {} if issubclass(kind, Exception) else typing.get_type_hints(kind.__init__)
        for name, hint in hints.items():
            if takes_words(hint):
                yield kind, name


def takes_words(hint: Any) -> bool:
    parts = [hint, *typing.get_args(hint)]
    return any(typing.get_origin(part) is Literal for part in parts)


SETTINGS = [*settings_of_words()]
assert {"GAE", "Prompts", "Reference", "TIS"} <= {kind.__name__ for kind, _ in SETTINGS}


@pytest.mark.parametrize(("kind", "setting"), SETTINGS)
def test_a_word_that_a_setting_does_not_know_is_refused(kind: type, setting: str) -> None:
    """A script may give any: such a `data.stragglers` neither waited nor masked, and tokens of any
    age were trained."""
    parameters = inspect.signature(kind).parameters
    required = inspect.Parameter.empty
    needed = {name: value for name, value in NEEDED.items() if name in parameters}
    if "tasks" in parameters:
        pytest.importorskip("reasoning_gym")
    if "url" in parameters:
        needed = {"url": "http://127.0.0.1:1"} | {
            name: value for name, value in needed.items() if parameters[name].default is required
        }
    with pytest.raises(ConfigError, match=f"{setting} is 'odd'"):
        kind(**needed | {setting: "odd"})
