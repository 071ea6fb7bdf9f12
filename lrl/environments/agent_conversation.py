"""The conversations of an agent with the policy, as an episode: a request is an observation, and its
answer a turn.

Each request of an agent holds a whole conversation. What it adds to one that was answered is what the
policy reads next; the turns themselves are never read again, so nothing is tokenised twice. An
agent that says something else of the past, or gives other tools, has begun a branch. It continues
the longest conversation that says the same, or begins anew with all of its messages: tokens that
were read otherwise are never patched.

The turns of an episode are written one after the other, also for requests that come at once: its
record is in the order of time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lrl.environments.base import BEGINNING, Message, Policy, Written
from lrl.environments.chat_request import (
    ChatRequest,
    RequestError,
    read_request,
    says_the_same,
    turn_message,
)

log = logging.getLogger(__name__)

_said_once: set[str] = set()
"""Settings of requests that this process has said to leave out."""


class Answered(NamedTuple):
    """A request that the policy has answered."""

    history: list[Message]
    """Its messages, and the answer."""
    tools: list[dict[str, Any]]
    key: str | None
    """Its Idempotency-Key."""
    turn: Written


class AgentConversation:
    """The conversations of one episode.

    Args:
        policy: Writes the turns.
        ignore: Settings of requests that are left out, and not refused.
        branches: Whether a request may continue another turn than the last one, or begin anew.
    """

    def __init__(self, policy: Policy, ignore: Collection[str], branches: bool = False) -> None:
        self._policy = policy
        self._ignore = ignore
        self._branches = branches
        self._answered: list[Answered] = []
        """By the number of the turn."""
        self._one_at_a_time = asyncio.Lock()

    @property
    def turns(self) -> int:
        """The turns that the agent has got."""
        return len(self._answered)

    async def answer(self, body: Any, *, again: bool = False, key: str | None = None) -> Written:
        """Returns a turn of the policy.

        Args:
            body: The JSON of a request.
            again: Whether the agent says that it sends this request once more.
            key: Its Idempotency-Key: a request is sent once more with the same one.

        Raises:
            RequestError: It is refused. The conversation stays as it was.
        """
        request = read_request(body, ignore=self._ignore)
        for name in sorted(set(request.left_out) - _said_once):
            _said_once.add(name)
            log.warning("Requests of the agent have %s, which is left out (Agent.ignore).", name)
        # A request that is sent again may come while the first one is still being answered.
        async with self._one_at_a_time:
            for one in reversed(self._answered):
                sent_before = again or (key is not None and key == one.key)
                if sent_before and _same(request.messages, one.history[:-1]):
                    return one.turn
            last = len(self._answered) - 1
            after = self._continued(request)
            if after != last and not self._branches:
                raise RequestError(
                    "it does not continue the last request: the tools and all messages that were "
                    "said, with the policy's answer, and at least one more that is no assistant's. "
                    "Without branches (Agent.branches) an episode is one such conversation"
                )
            begins = after == BEGINNING
            known = 0 if begins else len(self._answered[after].history)
            turn = await self._policy.turn(
                request.messages[known:],
                tools=request.tools if begins else (),
                after=None if after == last else after,
            )
            history = [*request.messages, turn_message(turn.content, turn.calls)]
            self._answered.append(Answered(history, request.tools, key, turn))
            return turn

    def _continued(self, request: ChatRequest) -> int:
        """Returns the number of the turn with the longest history that the request continues;
        `BEGINNING` if it continues none."""
        found, longest = BEGINNING, 0
        for number, one in enumerate(self._answered):
            known = len(one.history)
            added = request.messages[known:]
            if (
                added
                and known >= longest
                and request.tools == one.tools
                and _same(request.messages[:known], one.history)
                and not any(message["role"] == "assistant" for message in added)
            ):
                found, longest = number, known
        return found


def _same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    return len(one) == len(other) and all(map(says_the_same, one, other))
