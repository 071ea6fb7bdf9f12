"""Calls of tools in the tokens of a turn, found by vLLM's parser for the policy's family.

A generator's own server parses (`strategy.server.tool_parser`), so that training reads a turn as a
server of the exported policy will.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from lrl.environments import ToolCall
from lrl.errors import EpisodeError, GeneratorError
from lrl.generators.pool import GeneratorPool

log = logging.getLogger(__name__)

ROUTE = "/v1/chat/completions/derender"
DEADLINE_S = 60.0
"""Seconds for a parse; it takes milliseconds when nothing is wrong."""


class ToolCallParser:
    """Asks any generator of a pool, paused ones too. `ends` are tokens that end a response."""

    def __init__(self, pool: GeneratorPool, ends: Collection[int]) -> None:
        self._pool = pool
        self._ends = ends

    async def try_out(
        self, token_ids: list[int], text: str, tools: Sequence[dict[str, Any]]
    ) -> None:
        """Warns if the parser finds no call where the chat template has written one, of these
        tokens and this text."""
        _, calls = await self(token_ids, 0, tools)
        if not calls:
            log.warning(
                "strategy.server.tool_parser finds no call of a tool in %r, as the policy's chat "
                "template writes one: is it the parser of the policy's family?",
                text,
            )

    async def __call__(
        self, token_ids: list[int], turn: int, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, list[ToolCall]]:
        """Returns the text of a turn without its calls, and these in order; EpisodeError if no
        generator has parsed it. `turn` is its number, and `tools` are JSON schemas."""
        # The end of the turn would stand in the text that is parsed.
        text = token_ids[:-1] if token_ids and token_ids[-1] in self._ends else token_ids
        if not text:  # the route refuses it
            return "", []
        choice = {"index": 0, "token_ids": text, "finish_reason": "stop"}
        body = {
            "generate_response": {"request_id": "turn", "choices": [choice]},
            # vLLM wants a message, and reads none.
            "chat_request": {
                "messages": [{"role": "user", "content": ""}],
                "tools": list(tools),
                "tool_choice": "auto",
            },
        }
        try:
            answer = await self._pool.ask(ROUTE, body, deadline_s=DEADLINE_S)
            message = answer["choices"][0]["message"]
            calls = [
                ToolCall(
                    call["function"]["name"], call["function"]["arguments"], call_id(turn, number)
                )
                for number, call in enumerate(message.get("tool_calls") or [])
            ]
            return message.get("content") or "", calls
        except (GeneratorError, LookupError, TypeError, AttributeError) as error:
            raise EpisodeError("environment_error", f"the turn is not parsed: {error!r}") from error


def call_id(turn: int, number: int) -> str:
    """Returns the id of a call: the same at each play, and nine letters and digits, as Mistral's
    template asks."""
    return f"t{turn % 10_000:04d}c{number % 1_000:03d}"
