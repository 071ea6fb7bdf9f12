"""One episode of an environment, as a task that stops at each turn until the policy has written it."""

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Real
from reprlib import repr as shortened
from typing import Any, NamedTuple

from lrl.environments.base import BEGINNING, Environment, Observation, Written
from lrl.errors import EpisodeError
from lrl.rewards.base import LARGEST_REWARD


class Reply(NamedTuple):
    """The reply of an environment to a turn, or to the beginning of an episode."""

    observation: Observation = ""
    done: bool = False
    reward: float = 0.0
    tools: Sequence[dict[str, Any]] = ()
    """See `Policy.turn`."""
    after: int | None = None
    """See `Policy.turn`."""


def check_opening(opening: Reply) -> None:
    """Raises EpisodeError if an episode has ended, or has a reward, before its first turn."""
    if opening.done:
        text = "the episode has ended before the policy's first turn"
        raise EpisodeError("environment_error", text)
    if opening.reward:
        text = f"the first Policy.turn has the reward {opening.reward}, and no turn has earned it"
        raise EpisodeError("environment_error", text)


class Play:
    """The environment's side of an episode; it is the `Policy` that the environment gets.

    Args:
        environment: It is copied.
        replied: Receives each reply.
    """

    def __init__(self, environment: Environment, replied: Callable[[Reply], None]) -> None:
        self._environment = copy.deepcopy(environment)
        self._replied = replied
        self._written: asyncio.Queue[Written] = asyncio.Queue()
        self._asked = 0
        """Turns that the environment has asked for."""
        self._turns = 0
        """Turns that the policy has written."""

    async def run(self, prompt: str, columns: dict[str, Any]) -> None:
        """Plays the episode to its end; raises the errors of the environment."""
        played = self._environment.rollout(self, prompt, **columns)
        if not inspect.isawaitable(played):
            raise TypeError("rollout is a plain function; define it with `async def`")
        self._replied(Reply("", True, finite(await played)))

    def wrote(self, turn: Written) -> None:
        """Gives the environment the turn for which it waits."""
        self._turns += 1
        self._written.put_nowait(turn)

    async def turn(
        self,
        observation: Observation = "",
        reward: float = 0.0,
        tools: Sequence[dict[str, Any]] = (),
        after: int | None = None,
    ) -> Written:
        """See `lrl.environments.base.Policy`."""
        if after is not None and not self._environment.branches:
            raise TypeError("`after` is given, and `branches` is not true in the environment")
        if after is not None and not BEGINNING <= after < self._turns:
            raise ValueError(f"`after` is {after}, and the policy has written {self._turns} turns")
        if self._asked > self._turns:
            raise RuntimeError(
                "`Policy.turn` is called before the turn before is whole: await one after the other"
            )
        reply = Reply(readable(observation), False, finite(reward), tuple(tools), after=after)
        self._asked += 1
        self._replied(reply)
        return await self._written.get()


def readable(observation: Any) -> Observation:
    """Returns an observation; raises TypeError for what is none."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, list):
        if all(type(token) is int for token in observation):
            return observation
        if all(map(_is_message, observation)):
            return observation
    raise TypeError(
        f"the observation is {shortened(observation)}; give text, a list of token ids, or a list "
        'of chat messages such as {"role": "user", "content": "higher"}'
    )


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def finite(reward: Any) -> float:
    """Returns a reward; raises TypeError for what is none."""
    with suppress(OverflowError):  # a whole number beyond every float
        if isinstance(reward, Real) and abs(number := float(reward)) <= LARGEST_REWARD:
            return number
    raise TypeError(
        f"the reward is {shortened(reward)}; give a finite number, at most {LARGEST_REWARD:g} in size"
    )
