"""The channel between rank 0 and the other ranks: micro-batches and commands to them, results from
them.

Rank 0 sends without waiting for a busy rank: in lockstep sixteen ranks took 24 % longer, and 5 %
without (`benchmarks.rank_balance` at tag before-0.3).

A command is the call of a `collective` function of the policy: rank 0 calls it, and every rank runs
it. All that reads the policy's weights is one, because no rank may have all of them. The other ranks
obey within a step (`lrl.rollouts.stream.RankStream`) and while rank 0 runs its own callbacks
(`follow`). With one rank it is a plain call.
"""

import math
import pickle
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lrl.errors import RankLostError
from lrl.system.event_loop import POLL_S, start_daemon_call
from lrl.system.signals import Signals

P = ParamSpec("P")
T = TypeVar("T")

STOPPING_S = 20.0
"""Seconds that a rank has for its answer once a signal has come: a sharded policy is saved by all."""


class Ranks:
    """The trainer's ranks: a group of a CPU backend (gloo), so that no object goes through a GPU;
    None is one rank.

    Every method raises RankLostError if the rank at the other end has ended, or at the group's
    timeout. On rank 0 the first of `signals` ends a `gather`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, signals: Signals | None = None
    ) -> None:
        self._group = group
        self._signals = signals or Signals()
        self._deadline_s = math.inf
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.listening = True
        """Rank 0's: whether the other ranks obey it before they call a collective of their own."""
        self._on_their_way: list[tuple[int, dist.Work, Tensor]] = []

    def scatter(self, each: Sequence[Any]) -> Any:
        """Sends every other rank its part, without waiting, and returns the first part. Only rank 0
        calls this."""
        for rank, part in enumerate(each[1:], start=1):
            self._send(part, rank)
        return each[0]

    def wait_sent(self) -> None:
        """Waits until all parts have arrived."""
        while self._on_their_way:
            rank, work, _ = self._on_their_way.pop()
            with explain_rank_loss(f"Rank {rank}"):
                work.wait()

    def receive(self, rank: int = 0) -> Any:
        """Waits for the part that a rank has sent to this one."""
        size = torch.zeros(1, dtype=torch.int64)
        with explain_rank_loss(f"Rank {rank}"):
            dist.recv(size, rank, self._group)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(content, rank, self._group)
        return pickle.loads(content.numpy().tobytes())

    def share(self, what: T) -> T:
        """Returns rank 0's object on all ranks. All ranks call this; only rank 0's argument counts."""
        if self.rank:
            found: T = self.receive()
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
        end = time.monotonic() + self._deadline_s
        return [part, *(self._answer_of(rank, end) for rank in range(1, self.size))]

    @contextmanager
    def within(self, deadline_s: float) -> Iterator[None]:
        """Gives each `gather` of rank 0 in the block so many seconds."""
        self._deadline_s, before = deadline_s, self._deadline_s
        try:
            yield
        finally:
            self._deadline_s = before

    def _answer_of(self, rank: int, end: float) -> Any:
        # On a thread: within gloo's own wait no handler of a signal runs.
        answer = start_daemon_call(partial(self.receive, rank), "lrl-gather")
        while not wait([answer], POLL_S).done:
            now = time.monotonic()
            if self._signals.received is not None:
                end = min(end, now + STOPPING_S)
            if now >= end:
                self.listening = False
                self._signals.check()
                raise RankLostError(
                    f"Rank {rank} has not answered in time: it stands still, or its machine does."
                )
        return answer.result()

    def _send(self, part: Any, rank: int) -> None:
        content = torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8)
        with explain_rank_loss(f"Rank {rank}"):
            for tensor in (torch.tensor([len(content)]), content):
                work = dist.isend(tensor, rank, self._group)
                assert work is not None, "this process is in the group"
                self._on_their_way.append((rank, work, tensor))  # which must live until it is sent


@contextmanager
def explain_rank_loss(rank: str) -> Iterator[None]:
    """Turns any RuntimeError of a collective in the block into one that names the lost `rank`."""
    try:
        yield
    except RuntimeError as error:
        # The library's own words may have the rank's address.
        said = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]
        raise RankLostError(
            f"{rank} has ended or cannot be reached: look for its error above, or on its machine; "
            f"one that is gone has none ({said:.200})."
        ) from error


@contextmanager
def explain_broken_collective() -> Iterator[None]:
    """Turns the error of a lost rank into a RankLostError in a block where torch calls the
    collectives, among others. NCCL has a class for it, and gloo begins the text with its source
    file."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        with explain_rank_loss("Another rank"):
            raise


class HasRanks(Protocol):
    @property
    def ranks(self) -> Ranks: ...


Policy = TypeVar("Policy", bound=HasRanks)


class Command(NamedTuple):
    """A call that rank 0 has sent."""

    function: Any
    """A `collective`; only its name travels."""
    arguments: tuple[Any, ...]

    def obey(self, policy: HasRanks) -> None:
        result = self.function.__wrapped__(policy, *self.arguments)
        if isinstance(result, Iterator):
            deque(result, maxlen=0)  # a generator does its part only as it is read


def follow(policy: HasRanks, last: bool = False) -> None:
    """Obeys rank 0's commands until rank 0 comes here, too. Every rank calls it.

    `last` says that the ranks do not follow again before the next step or hook.
    """
    ranks = policy.ranks
    if ranks.rank == 0:
        ranks.scatter([None] * ranks.size)
        if last:
            ranks.wait_sent()  # if this process ended now, what is on its way would be lost
        ranks.listening = not last
        return
    while (command := ranks.receive()) is not None:
        command.obey(policy)


def collective(body: Callable[Concatenate[Policy, P], T]) -> Callable[Concatenate[Policy, P], T]:
    """Makes every rank run `body` when rank 0 calls it; `body` takes the policy, and arguments that
    can be pickled. Use it as a decorator: the other ranks find the function by its name.

    The result is rank 0's own. RuntimeError if another rank calls it by itself, or if a rank has
    ended.
    """

    @wraps(body)
    def call(policy: Policy, *arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "a command carries no names"
        ranks = policy.ranks
        if ranks.rank:
            raise RuntimeError(
                f"Rank {ranks.rank} has called {body.__qualname__} by itself. Rank 0 leads all "
                "reads of the policy's weights: call it in a hook of a callback that derives from "
                "lrl.callbacks.OnRankZero."
            )
        ranks.scatter([None, *[Command(call, arguments)] * (ranks.size - 1)])
        return body(policy, *arguments, **named)

    return call
