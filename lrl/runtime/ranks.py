"""Scatter of micro-batches from rank 0 to the other ranks.

Rank 0 sends without waiting for a busy rank. Ranks differ from micro-batch to micro-batch even when they have equal
work over the step, and in lockstep each would take as long as the slowest one: with sixteen ranks that cost 24 % more,
and 5 % without (`python -m benchmarks.rank_balance`).
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The trainer's ranks: a group of a CPU backend (gloo), so that no object goes through a GPU; None is one rank."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self._on_their_way: list[tuple[dist.Work, Tensor]] = []

    def scatter(self, each: Sequence[Any]) -> Any:
        """Sends every other rank its part and returns the first part; raises RuntimeError if a rank has ended.

        Only rank 0 calls this; the other ranks call `receive`.
        """
        for rank, part in enumerate(each[1:], start=1):
            content = torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8)
            with explain_rank_loss("Another rank"):
                for tensor in (torch.tensor([len(content)]), content):
                    work = dist.isend(tensor, rank, self._group)
                    assert work is not None, "this process is in the group"
                    self._on_their_way.append((work, tensor))  # a tensor must live until it is sent
        return each[0]

    def wait_sent(self) -> None:
        """Waits, on rank 0, until all parts have arrived; see `scatter` for the errors."""
        with explain_rank_loss("Another rank"):
            while self._on_their_way:
                self._on_their_way.pop()[0].wait()

    def receive(self) -> Any:
        """Waits, on any other rank, for its part; raises RuntimeError if rank 0 ended, or at the group's timeout."""
        size = torch.zeros(1, dtype=torch.int64)
        with explain_rank_loss("Rank 0"):
            dist.recv(size, 0, self._group)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(content, 0, self._group)
        return pickle.loads(content.numpy().tobytes())


@contextmanager
def explain_rank_loss(rank: str) -> Iterator[None]:
    """Turns any RuntimeError of a collective in the block into one that names the lost `rank`."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{rank} does not take part in the step any more: look for its error above.") from error
