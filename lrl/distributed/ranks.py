"""The channel between rank 0 and the other ranks: micro-batches and commands to them, results from
them.

Rank 0 sends without waiting for a busy rank. Ranks differ from micro-batch to micro-batch even when
they have equal work over the step, and in lockstep each would take as long as the slowest one: with
sixteen ranks that cost 24 % more, and 5 % without (`python -m
benchmarks.rank_balance` at tag before-0.3).
"""

import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lrl.errors import RankLostError

T = TypeVar("T")


class Ranks:
    """The trainer's ranks: a group of a CPU backend (gloo), so that no object goes through a GPU;
    None is one rank.

    Every method raises RankLostError if the rank at the other end has ended, or at the group's
    timeout.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        """The rank of this process."""
        self.listening = True
        """Rank 0's: whether the other ranks wait for it, or will before they call a collective of
        their own."""
        self._on_their_way: list[tuple[dist.Work, Tensor]] = []

    def scatter(self, each: Sequence[Any]) -> Any:
        """Sends every other rank its part, without waiting, and returns the first part. Only rank 0
        calls this."""
        for rank, part in enumerate(each[1:], start=1):
            self._send(part, rank)
        return each[0]

    def wait_sent(self) -> None:
        """Waits until all parts have arrived."""
        with explain_rank_loss(self._other):
            while self._on_their_way:
                self._on_their_way.pop()[0].wait()

    def receive(self) -> Any:
        """Waits, on any other rank, for its part from rank 0."""
        return self._receive(0)

    def share(self, what: T) -> T:
        """Returns rank 0's object on all ranks. All ranks call this; only rank 0's argument counts."""
        if self.rank:
            found: T = self._receive(0)
            return found
        self.scatter([what] * self.size)
        self.wait_sent()
        return what

    def gather(self, part: Any) -> list[Any]:
        """Returns the parts of all ranks on rank 0, by rank, and nothing on the others. All ranks
        call this."""
        if self.rank:
            self._send(part, 0)
            self.wait_sent()
            return []
        return [part, *(self._receive(rank) for rank in range(1, self.size))]

    def _send(self, part: Any, rank: int) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8)
        with explain_rank_loss(self._other):
            for tensor in (torch.tensor([len(content)]), content):
                work = dist.isend(tensor, rank, self._group)
                assert work is not None, "this process is in the group"
                self._on_their_way.append((work, tensor))  # a tensor must live until it is sent

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        with explain_rank_loss(self._other):
            dist.recv(size, rank, self._group)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(content, rank, self._group)
        return pickle.loads(content.numpy().tobytes())

    @property
    def _other(self) -> str:
        return "Rank 0" if self.rank else "Another rank"


@contextmanager
def explain_rank_loss(rank: str) -> Iterator[None]:
    """Turns any RuntimeError of a collective in the block into one that names the lost `rank`."""
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"{rank} has ended or cannot be reached: {_look(error)}") from error


@contextmanager
def explain_broken_collective() -> Iterator[None]:
    """Turns the error of a lost rank into a RankLostError in a block where torch calls the
    collectives, among others.

    NCCL has a class of its own for it, and gloo begins the text with its source file.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise RankLostError(
                f"Another rank has ended or cannot be reached: {_look(error)}"
            ) from error
        raise


def _look(error: RuntimeError) -> str:
    """Returns where to look for a lost rank's error, and the library's own words, which may have
    its address."""
    said = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]
    return f"look for its error above, or on its machine; one that is gone has none ({said:.200})."
