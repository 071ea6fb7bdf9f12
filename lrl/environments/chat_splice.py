"""The splice of a conversation: tokens that the policy sampled stay, and only what stands behind
them is taken from a rendering of the chat.

A chat template renders whole conversations, and tokens of a rendering are not those that were
sampled: text may be tokenised otherwise, thinking be dropped, arguments be spaced anew. So the
policy's turns are not in the chat that is rendered. In the place of each there is a stand-in, with
the names and ids of its calls. What follows the token that ends the last stand-in is what the
template puts behind a turn. It cannot matter what the policy has written, a special token's letters
included, or what the template does to earlier messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from lrl.environments.base import Message, ToolCall

STAND_IN = "standin"
"""A word that every template renders as it is."""
_PLAIN_NAME = re.compile(r"[\w.-]+")


class Behind(NamedTuple):
    """The end of a turn in a rendering, and the tokens behind it."""

    end: int
    """The token that ends the turn."""
    token_ids: list[int]
    """All tokens after it."""

    def after(self, turn: Sequence[int], ends: Collection[int]) -> list[int]:
        """Returns what follows a recorded turn: the end comes first if the turn lacks one of
        `ends`."""
        return self.token_ids if turn and turn[-1] in ends else [self.end, *self.token_ids]


def stand_in(word: str, calls: Sequence[ToolCall] = ()) -> Message:
    """Returns the message in the place of a turn.

    Args:
        word: It stands for the text.
        calls: The calls of the turn; templates put their names and ids into the results.
    """
    if not calls:
        return {"role": "assistant", "content": word}
    # Some templates put the results of calls before the content of the message, others show no
    # content of a message with calls.
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [_call(call, word) for call in calls],
    }


def unused_word(messages: Sequence[Message]) -> str:
    """Returns a word for `stand_in` that is not in the messages behind it."""
    text, word = str(messages), STAND_IN
    while word in text:
        word += "x"
    return word


def behind_stand_in(
    rendered: Sequence[int],
    word: str,
    ends: Collection[int],
    decode: Callable[[Sequence[int]], str],
) -> Behind | None:
    """Finds what a rendering has behind its last stand-in.

    Args:
        rendered: Tokens of the conversation.
        word: The word of that stand-in.
        ends: Tokens that end a turn.
        decode: Returns the text of tokens, special ones included.

    Returns:
        None if no token of `ends` stands behind it, or the rendering lacks it.
    """
    found, stop = None, len(rendered)
    for place in reversed([place for place, token in enumerate(rendered) if token in ends]):
        if word in decode(rendered[place + 1 : stop]):
            return found
        found = Behind(rendered[place], list(rendered[place + 1 :]))
        stop = place
    return found if word in decode(rendered[:stop]) else None


def _call(call: ToolCall, word: str) -> Message:
    function = {"name": _plain(call.name), "arguments": {"value": word}}
    return {"type": "function", "id": call.id, "function": function}


def _plain(name: str) -> str:
    """Returns the name of a tool; a stand-in for one that could have a special token's letters."""
    return name if _PLAIN_NAME.fullmatch(name) else STAND_IN
