"""An environment that answers turn after turn."""

import inspect
from abc import abstractmethod
from collections.abc import Awaitable
from numbers import Real
from reprlib import repr as shortened
from typing import Any

from lrl.environments.base import Environment, Observation, Policy

Answer = tuple[Observation, bool, float]
"""What the policy reads next, whether the episode has ended, and the reward of the turn."""


class Turns(Environment):
    """An environment of two methods, plain or `async`. What an episode remembers is an attribute
    that `start` sets."""

    reads_tokens: bool = False
    """Whether `reply` gets a turn as token ids, and not as text."""

    def start(
        self, prompt: str, **columns: Any
    ) -> Observation | None | Awaitable[Observation | None]:
        """Begins an episode; may return an observation that follows the prompt. Chat messages need
        `opens`.

        Args:
            prompt: The prompt as its author wrote it.
            columns: The other columns of the row.
        """
        return None

    @abstractmethod
    def reply(self, turn: Any) -> Answer | Awaitable[Answer]:
        """Answers a turn: `(observation, done, reward)`.

        Args:
            turn: Its text, a str; with `reads_tokens` its token ids, a list of int.
        """

    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        """Plays one episode (`Environment.rollout`)."""
        observation = await _result(self.start(prompt, **columns)) or ""
        reward = 0.0
        while True:
            turn = await policy.turn(observation, reward)
            answer = await _result(self.reply(turn.token_ids if self.reads_tokens else turn.text))
            observation, done, reward = checked(answer)
            if done:
                return reward


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def checked(answer: Any) -> Answer:
    """Returns the result of `reply`; raises TypeError if it is no reply."""
    match answer:
        case [observation, bool(done), Real() as reward]:
            return observation, done, float(reward)
    raise TypeError(
        f"reply returned {shortened(answer)}; give (observation, done, reward): text, token ids or "
        "chat messages, True or False, a number"
    )
