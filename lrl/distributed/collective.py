"""Collective functions of the policy: rank 0 calls one, and every rank runs it.

All that reads the policy's weights is such a function, because no rank may have all of them. Rank 0
alone decides when: it sends the call through the channel of the micro-batches, and the other ranks
obey it wherever they listen there. They listen within a step (`lrl.rollouts.stream.RankStream`) and
while rank 0 runs its own callbacks (`follow`). With one rank it is a plain call.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from lrl.distributed.ranks import Ranks

P = ParamSpec("P")
T = TypeVar("T")


class HasRanks(Protocol):
    """A policy, as far as its collective functions are concerned."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that train."""


Kind = TypeVar("Kind", bound=HasRanks)

BODIES: dict[str, Callable[..., Any]] = {}
"""Each collective function by its module and name."""


class Command(NamedTuple):
    """A call that rank 0 has sent."""

    function: str
    arguments: tuple[Any, ...]

    def obey(self, policy: HasRanks) -> None:
        """Runs the function on another rank than 0."""
        result = BODIES[self.function](policy, *self.arguments)
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


def collective(body: Callable[Concatenate[Kind, P], T]) -> Callable[Concatenate[Kind, P], T]:
    """Makes every rank run `body` when rank 0 calls it; `body` takes the policy, and arguments that
    can be pickled.

    The result is rank 0's own. RuntimeError if another rank calls it by itself, or if a rank has
    ended.
    """
    name = f"{body.__module__}.{body.__qualname__}"
    BODIES[name] = body

    @wraps(body)
    def call(policy: Kind, *arguments: P.args, **named: P.kwargs) -> T:
        assert not named, "a command carries no names"
        ranks = policy.ranks
        if ranks.rank:
            raise RuntimeError(
                f"Rank {ranks.rank} has called {body.__qualname__} by itself. Rank 0 leads all "
                "reads of the policy's weights: call it in a hook of a callback that derives from "
                "lrl.callbacks.OnRankZero."
            )
        ranks.scatter([None, *[Command(name, arguments)] * (ranks.size - 1)])
        return body(policy, *arguments, **named)

    return call
