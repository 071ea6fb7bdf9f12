"""Classes by their bare names, such as `--model.objective TBA`.

jsonargparse knows the classes that are imported, and a room of lrl imports a class at its first
use. So all are imported where a bare name is to be found, or the choices are to be listed.
"""

from functools import cache
from importlib import import_module
from typing import Any

from jsonargparse import _typehints

ROOMS = (
    "lrl",
    "lrl.callbacks",
    "lrl.members.launchers",
    "lrl.objectives",
    "lrl.rewards",
    "lrl.routing.dispatch",
    "lrl.routing.rankers",
)
_known: Any = _typehints.get_all_subclass_paths


def install() -> None:
    """Replaces jsonargparse's list of known classes in this process."""
    _typehints.get_all_subclass_paths = _all_of_lrl


def _all_of_lrl(*kinds: Any, **how: Any) -> list[str]:
    _import_all()
    found: list[str] = _known(*kinds, **how)
    return found


@cache  # a command looks for a bare name thirty times
def _import_all() -> None:
    for room in map(import_module, ROOMS):
        for name in room.__all__:
            getattr(room, name, None)  # lrl has no version where it is not installed
