"""How rank 0, which has the groups, hands micro-batches to the other processes that train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


class Ranks:
    """The processes that train, as each of them sees them; one alone unless a group is given.

    Args:
        group: A process group with rank 0 in it, for objects: of a backend for the CPU (gloo), so that nothing of what
            is handed out has to go through a GPU.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)

    def hand_out(self, each: Sequence[Any]) -> Any:
        """On rank 0: give every rank its part, and return the first, rank 0's own. All others call `receive`.

        Raises:
            RuntimeError: Another rank has ended.
        """
        return each[0] if self._group is None else self._scatter(list(each))

    def receive(self) -> Any:
        """On any other rank: wait for what rank 0 hands out.

        Raises:
            RuntimeError: Rank 0 has ended, or has handed out nothing within the group's timeout.
        """
        return self._scatter(None)

    def _scatter(self, each: list[Any] | None) -> Any:
        found: list[Any] = [None]
        try:
            dist.scatter_object_list(found, each, src=0, group=self._group)
        except RuntimeError as error:
            whom = "Rank 0" if each is None else "Another rank"
            raise RuntimeError(f"{whom} does not take part in the step any more: look for its error above.") from error
        return found[0]
