"""Splits a checkpoint into parts that can be read again and parts that cannot.

Lightning and lrl read checkpoints by `torch.load` with `weights_only=True`, which refuses objects
that are neither plain nor tensors. It refuses the whole file, and says so when the file is needed.
So what could not be read is found when it is saved, and is left out.
"""

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, Parameter)
MAPPINGS = (dict, OrderedDict)
SEQUENCES = (list, tuple, set)


class Unreadable(NamedTuple):
    """A value of a checkpoint that could not be read again."""

    path: tuple[Any, ...]
    """The keys that lead to it."""
    kind: type

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))} ({self.kind.__module__}.{self.kind.__qualname__})"


def unreadable(state: Any, path: tuple[Any, ...] = ()) -> Iterator[Unreadable]:
    """Yields the values in `state` that could not be read again."""
    kind = type(state)
    if kind in PLAIN:
        return
    if kind in MAPPINGS:
        for key, value in state.items():
            yield from unreadable(key, (*path, key))
            yield from unreadable(value, (*path, key))
    elif kind in SEQUENCES:
        for index, value in enumerate(state):
            yield from unreadable(value, (*path, index))
    elif not _comes_back(state):
        yield Unreadable(path, kind)


def readable(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], list[Unreadable]]:
    """Returns a checkpoint without its unreadable parts, and the faults of these parts.

    A part is an entry of the checkpoint, or of a dict in it: the state of one callback, or of one
    part of the data module. Half of it would be restored as if it were whole.
    """
    faults = list(unreadable(checkpoint))
    whole = dict(checkpoint)
    for first, *others in (fault.path for fault in faults):
        if others and isinstance(whole.get(first), dict):
            whole[first] = {key: value for key, value in whole[first].items() if key != others[0]}
        else:
            whole.pop(first, None)
    return whole, faults


def _comes_back(value: Any) -> bool:
    """Returns whether a value can be read again, by trying: users may have allowed classes of their
    own (`torch.serialization.add_safe_globals`)."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - any class may say in any way that it cannot be pickled
        return False
    return True
