"""The splice of a conversation: tokens that the policy sampled stay, and only what stands behind
them is taken from a rendering of the chat.

A chat template renders whole conversations, and tokens of a rendering are not those that were
sampled: text may be tokenised otherwise, thinking be dropped, arguments be spaced anew. So the
policy's turns are not in the chat that is rendered. In the place of each there is a stand-in, with
the names and ids of its calls. What follows the last stand-in is what the template puts behind a
turn. It cannot matter what the policy has written, a special token's letters included, or what the
template does to earlier messages.

A turn may end at any of several tokens, and the template has its own: an end, or the header of the
next message, which tells a tool's result from a user's words. The sampled token stays, and the
template's follows, unless it is the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from os.path import commonprefix
from typing import NamedTuple

from lrl.environments.base import Message, ToolCall

STAND_IN = "standin"
"""A word that every template renders as it is."""
_PLAIN_NAME = re.compile(r"[\w.-]+")


class Behind(NamedTuple):
    """The tokens that a chat template adds after a turn."""

    end: int
    """The token that ends the turn: the template's end, or the header of the next message."""
    token_ids: list[int]
    """All tokens after it."""

    def after(self, turn: Sequence[int]) -> list[int]:
        """Returns what follows a recorded turn: the end, unless the turn has it, and the rest."""
        return self.token_ids if turn and turn[-1] == self.end else [self.end, *self.token_ids]


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
    alone: Sequence[int], behind: Sequence[int], ends: Collection[int], special: Collection[int]
) -> Behind | None:
    """Finds the end of the last stand-in among the tokens that a rendering has behind its word.

    Args:
        alone: These tokens where the stand-in is the last message, without the next header.
        behind: These tokens with messages behind the stand-in.
        ends: Tokens that end a turn.
        special: Special tokens of the tokenizer.

    Returns:
        None if neither a token of `ends` nor the header of the next message ends it.
    """
    # What both have belongs to the stand-in: the rest of a call, say, and its end if it has one.
    own = len(commonprefix([list(alone), list(behind)]))
    for place, token in enumerate(behind[: own + 1]):
        if token in ends or (place == own and token in special):
            return Behind(token, list(behind[place + 1 :]))
    return None


def _call(call: ToolCall, word: str) -> Message:
    function = {"name": _plain(call.name), "arguments": {"value": word}}
    return {"type": "function", "id": call.id, "function": function}


def _plain(name: str) -> str:
    """Returns the name of a tool; a stand-in for one that could have a special token's letters."""
    return name if _PLAIN_NAME.fullmatch(name) else STAND_IN
