"""How rank 0, which has the groups, hands micro-batches to the other processes that train.

Rank 0 sends and trains on: nobody waits for a rank that is still busy with what it had before. Ranks differ from
micro-batch to micro-batch even when they have equal work over the step, and in lockstep each would take as long as the
slowest one: with sixteen ranks that cost 24 % more, and 5 % without (`python -m benchmarks.rank_balance`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The processes that train, as each of them sees them; one alone unless a group is given.

    Args:
        group: A process group with rank 0 in it, for objects: of a backend for the CPU (gloo), so that nothing of what
            is handed out has to go through a GPU.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self._on_their_way: list[tuple[dist.Work, Tensor]] = []

    def scatter(self, each: Sequence[Any]) -> Any:
        """On rank 0: send every other rank its part, and return the first, rank 0's own. The others call `receive`.

        Raises:
            RuntimeError: Another rank has ended.
        """
        for rank, part in enumerate(each[1:], start=1):
            self._send(torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8), rank)
        return each[0]

    def wait_sent(self) -> None:
        """On rank 0: wait until all that was sent has arrived; for the errors see `scatter`."""
        with explain_rank_loss("Another rank"):
            while self._on_their_way:
                self._on_their_way.pop()[0].wait()

    def receive(self) -> Any:
        """On any other rank: wait for what rank 0 hands out.

        Raises:
            RuntimeError: Rank 0 has ended, or has handed out nothing within the group's timeout.
        """
        size = torch.zeros(1, dtype=torch.int64)
        with explain_rank_loss("Rank 0"):
            dist.recv(size, 0, self._group)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(content, 0, self._group)
        return pickle.loads(content.numpy().tobytes())

    def _send(self, content: Tensor, rank: int) -> None:
        """Its size, then itself; both stay in memory until `wait_sent`, which also tells of a send that failed."""
        with explain_rank_loss("Another rank"):
            for tensor in (torch.tensor([len(content)]), content):
                work = dist.isend(tensor, rank, self._group)
                assert work is not None, "this process is in the group"
                self._on_their_way.append((work, tensor))


@contextmanager
def explain_rank_loss(whom: str) -> Iterator[None]:
    """For collectives alone: whatever they say when another process is gone, it is said who to look at.

    Raises:
        RuntimeError: A collective in the block failed.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{whom} does not take part in the step any more: look for its error above.") from error
