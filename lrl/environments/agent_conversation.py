"""The conversation of an agent with the policy, as an episode: a request is an observation, and its
answer a turn.

Each request of an agent holds the whole conversation. What it adds to the one before is what the
policy reads next; the turns themselves are never read again, so nothing is tokenised twice. An
agent that says something else of the past has begun another conversation, and an episode has one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

from lrl.environments.base import Message, Policy, Written
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


class AgentConversation:
    """One conversation.

    Args:
        policy: Writes the turns.
        ignore: Settings of requests that are left out, and not refused.
    """

    def __init__(self, policy: Policy, ignore: Collection[str]) -> None:
        self._policy = policy
        self._ignore = ignore
        self._history: list[Message] = []
        """All messages, the policy's included."""
        self._tools: list[dict[str, Any]] = []
        self._asked: list[Message] = []
        """The messages of the last request that was answered."""
        self._turn: Written | None = None
        """Its answer."""
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, body: Any, *, again: bool) -> Written:
        """Returns the policy's next turn.

        Args:
            body: The JSON of a request.
            again: Whether the agent says that it sends this request once more.

        Raises:
            RequestError: It is refused. The conversation stays as it was.
        """
        request = read_request(body, ignore=self._ignore)
        for name in sorted(set(request.left_out) - _said_once):
            _said_once.add(name)
            log.warning("Requests of the agent have %s, which is left out (Agent.ignore).", name)
        # A request that is sent again may come while the first one is still being answered.
        async with self._one_at_a_time:
            if again and self._turn is not None and _same(request.messages, self._asked):
                return self._turn
            added = self._added(request)
            tools = () if self._history else request.tools
            turn = await self._policy.turn(added, tools=tools)
            self._tools = request.tools
            self._asked = request.messages
            self._turn = turn
            self._history = [*request.messages, turn_message(turn.content, turn.calls)]
            return turn

    def _added(self, request: ChatRequest) -> list[Message]:
        """Returns the messages behind the policy's last turn."""
        messages, known = request.messages, len(self._history)
        if not known:
            return messages
        if request.tools != self._tools:
            raise RequestError(
                "the tools are others than in the request before. An episode has one list of tools"
            )
        for number, (said, now) in enumerate(zip(self._history, messages, strict=False)):
            if not says_the_same(said, now):
                raise RequestError(
                    f"messages[{number}], of the role {now['role']!r}, is not what was said before. "
                    "An episode is one conversation, to which each request adds: have the agent "
                    "keep its history, or play the other conversation in an episode of its own"
                )
        added = messages[known:]
        if not added:
            raise RequestError(
                "it adds no message to the conversation, and does not say that it is sent again "
                "(x-stainless-retry-count, Idempotency-Key). An episode has one turn after each "
                "message"
            )
        if any(message["role"] == "assistant" for message in added):
            raise RequestError("it adds an assistant message that the policy has not written")
        return added


def _same(one: list[Message], other: list[Message]) -> bool:
    return len(one) == len(other) and all(map(says_the_same, one, other))
