"""Tokens of what an environment writes, in the order of an episode.

Text is tokenised alone. Chat messages are rendered by the policy's chat template with all that
stands before them, once a turn. Tokens of a rendering are not those that were sampled: text may be
tokenised otherwise, thinking dropped, arguments spaced anew. So each of the policy's turns is a
stand-in in the chat that is rendered, with the names and ids of its calls, and what follows the
last one is what the template puts behind a turn. It cannot matter what the policy has written.

A turn may end at any of several tokens, and the template has its own: an end, or the header of the
next message, which tells a tool's result from a user's words. The sampled token stays, and the
template's follows, unless it is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from lrl.environments import Environment, Message, ToolCall, Written
from lrl.environments.base import BEGINNING
from lrl.environments.play import Reply
from lrl.errors import ConfigError, EpisodeError
from lrl.rollouts.policy_text import PolicyText, decoded, encode, encode_chat, render_chat
from lrl.types import Chat, Prompt

NO_CHAT = (
    "the observation is chat messages, and the prompt is plain text. Take a policy whose tokenizer "
    "has a chat template, and leave data.prompts.chat out; or reply with text"
)
NO_PARSER = (
    "the policy gets tools, and strategy.server.tool_parser is null: name vLLM's parser for the "
    "policy's family, such as hermes (Qwen2.5, Qwen3), llama3_json, mistral, pythonic"
)
STAND_IN = "standin"
"""A word that every template renders as it is."""
_PLAIN_NAME = re.compile(r"[\w.-]+")
_QUESTION = {"role": "user", "content": "go"}


@dataclass
class Transcript:
    """The observations of one episode after a prompt, each with all that stands before it."""

    prompt: Prompt
    policy: PolicyText
    environment: Environment
    parses: bool = True
    """Whether the generators find calls of tools."""

    def __post_init__(self) -> None:
        self.tools = self.environment.tools
        """JSON schemas of what the policy may call; known after the opening observation."""
        self.tokenizer = self.policy.tokenizer
        self._chat = self.prompt.chat
        self._turns: list[tuple[Chat | None, Written]] = []
        """Each turn with the chat that it answers."""

    def ids(self, reply: Reply, turn: Written | None) -> list[int]:
        """Returns the tokens of the reply to a turn, or at the beginning (None); raises
        EpisodeError if the policy cannot read it."""
        if turn is not None:
            self._turns.append((self._chat, turn))
        if reply.done:
            return []
        if reply.after == BEGINNING:
            self._chat, turn = self.prompt.chat, None
        elif reply.after is not None:
            self._chat, turn = self._turns[reply.after]
            if self.environment.writes_prompt and self._chat is not None:
                self.tools = self._chat.tools
        try:
            found = self._ids(reply, turn)
        except ConfigError as error:
            raise EpisodeError("environment_error", str(error)) from error
        if self.tools and not self.parses:
            raise EpisodeError("environment_error", NO_PARSER)
        return found

    def _ids(self, reply: Reply, turn: Written | None) -> list[int]:
        observation, tools = reply.observation, reply.tools
        if tools and not (turn is None and self.environment.writes_prompt):
            raise ConfigError(
                "`Policy.turn` has tools, which go with the first observation of an environment "
                "that `writes_prompt`; another one has the property `tools`"
            )
        if isinstance(observation, list) and observation and isinstance(observation[0], dict):
            messages: Any = observation
            return self._opening(messages, tools) if turn is None else self._after(turn, messages)
        if turn is None and self.environment.opens:
            raise ConfigError(
                "`opens` is true, so the prompt ends before the header of the policy's message: "
                "give the observation before the first turn as chat messages"
            )
        if isinstance(observation, str):
            return encode(self.tokenizer, observation) if observation else []
        token_ids: Any = observation
        vocabulary = len(self.tokenizer)
        if unknown := [token for token in token_ids if not 0 <= token < vocabulary]:
            raise ConfigError(
                f"the observation has the token {unknown[0]}, and the policy has {vocabulary}"
            )
        return list(token_ids)

    def _opening(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        begun = self.prompt.token_ids
        if not self.environment.opens:
            if not self.prompt.chat:
                raise ConfigError(NO_CHAT)
            raise ConfigError(
                "the observation before the first turn is chat messages, and the prompt ends with "
                "the header of the policy's message: set `opens = True` in the environment's class"
            )
        if self.environment.writes_prompt:
            variables = {} if self.prompt.chat is None else self.prompt.chat.variables
            self._chat = Chat([], tools, variables)
            self.tools = tools
            self._check_tools(messages, tools)

        def after_prompt(chat: Chat, behind: list[Message]) -> list[int]:
            rendered = encode_chat(self.tokenizer, _grown(chat, behind))
            if rendered[: len(begun)] != begun:
                raise ConfigError(
                    "the chat template renders the prompt otherwise with messages behind it: give "
                    "those in the prompt"
                )
            return rendered[len(begun) :]

        return self._add([], messages, after_prompt)

    def _check_tools(self, messages: list[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Raises ConfigError if the chat template leaves tools out of these messages."""
        form = ("tools", *(message["role"] for message in messages))
        if tools and form not in self.policy.shown:
            shown = render_chat(self.tokenizer, Chat(messages, tools))
            if shown == render_chat(self.tokenizer, Chat(messages)):
                raise ConfigError(
                    "the policy's chat template leaves the tools out. Take a model whose chat "
                    "template knows tools"
                )
            self.policy.shown.add(form)

    def _after(self, turn: Written, messages: list[Message]) -> list[int]:
        word = STAND_IN
        while word in str(messages):
            word += "x"

        def after_turn(chat: Chat, behind: list[Message]) -> list[int]:
            return self._behind(turn.token_ids, chat, behind, word)

        try:
            return self._add([stand_in(word, turn.calls)], messages, after_turn)
        except ConfigError:
            if len(turn.calls) < 2:
                raise
            # Llama's template takes one call a turn.
            return self._add([stand_in(word, turn.calls[:1])], _joined(messages), after_turn)

    def _add(
        self,
        turn: list[Message],
        messages: list[Message],
        tokens_of: Callable[[Chat, list[Message]], list[int]],
    ) -> list[int]:
        """Adds a turn's stand-in and messages to the chat; returns the messages' tokens."""
        if self._chat is None:
            raise ConfigError(NO_CHAT)
        chat = _grown(self._chat, turn)
        form = (*(tuple(one) for one in turn), *(one["role"] for one in messages))
        if form not in self.policy.shown:
            # Digits: a small vocabulary may have no letters.
            words = [one | {"content": str(70310 + number)} for number, one in enumerate(messages)]
            text = decoded(self.tokenizer, tokens_of(chat, words))
            # Some templates show no content of a message with calls.
            shown = [one for one in words if not one.get("tool_calls")]
            if lacking := [one["role"] for one in shown if one["content"] not in text]:
                raise ConfigError(
                    f"the chat template leaves out the content of the {lacking[0]} message, or "
                    "puts it before the end of the policy's. Take a model with another template"
                )
            self.policy.shown.add(form)
        ids = tokens_of(chat, messages)
        self._chat = _grown(chat, messages)
        return ids

    def _behind(self, turn: list[int], chat: Chat, messages: list[Message], word: str) -> list[int]:
        """Returns what follows the tokens of a turn: the template's end, unless the turn has it,
        and `messages`. `chat` ends with the turn's stand-in, which has the `word`."""
        alone = self._behind_word(chat, word, header=False)
        behind = self._behind_word(_grown(chat, messages), word)
        # What both have belongs to the stand-in: the rest of a call, say, and its end if any.
        own = len(commonprefix([alone, behind]))
        for place, token in enumerate(behind[: own + 1]):
            is_header = place == own and token in self.tokenizer.all_special_ids
            if token in self.policy.ends or is_header:
                has_end = turn[-1:] == [token]
                return behind[place + has_end :]
        ends = sorted(decoded(self.tokenizer, [end]) for end in self.policy.ends)
        raise ConfigError(
            "the chat template puts no token that ends a response "
            f"({', '.join(map(repr, ends)) or 'there is none'}) behind the policy's message: "
            "correct eos_token_id in generation_config.json, or the template"
        )

    def _behind_word(self, chat: Chat, word: str, header: bool = True) -> list[int]:
        """Returns the tokens behind the last place of a word in the rendering of a chat; none if
        it has no such word."""
        text = render_chat(self.tokenizer, chat, header=header)
        return encode(self.tokenizer, text.rpartition(word)[2]) if word in text else []


def check_result(policy: PolicyText, environment: Environment) -> None:
    """Raises ConfigError if the chat template does not show the policy the result of a tool."""
    chat = Chat([_QUESTION], environment.tools)
    transcript = Transcript(Prompt(id=0, token_ids=[], text="", chat=chat), policy, environment)
    call = ToolCall(environment.tools[0]["function"]["name"], "", "t0000c000")
    result = {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": "done"}
    try:
        transcript.ids(Reply([result]), Written("", [], [call]))
    except EpisodeError as error:
        raise ConfigError(
            f"data.environment is {type(environment).__name__}, and the policy cannot read the "
            f"result of a tool: {error}. Take a model whose chat template knows tools."
        ) from error


def call_tokens(policy: PolicyText, tools: Sequence[dict[str, Any]]) -> list[int]:
    """Returns a call of the first tool as the chat template writes it, without the turn's end."""
    chat = Chat([_QUESTION], tools)
    call = ToolCall(tools[0]["function"]["name"], "", "t0000c000")
    before = encode_chat(policy.tokenizer, chat)
    grown = _grown(chat, [stand_in(STAND_IN, [call])])
    rendered = encode_chat(policy.tokenizer, grown, header=False)
    written = rendered[len(commonprefix([before, rendered])) :]
    end = next((place for place, token in enumerate(written) if token in policy.ends), None)
    return written[:end]


def _grown(chat: Chat, messages: list[Message]) -> Chat:
    return chat._replace(messages=[*chat.messages, *messages])


def _joined(messages: list[Message]) -> list[Message]:
    """Puts the results of all calls into the message of the first one."""
    results = [message for message in messages if message["role"] == "tool"]
    if not results:
        return messages
    content = "\n".join(message["content"] for message in results)
    others = [message for message in messages if message["role"] != "tool"]
    return [results[0] | {"content": content}, *others]


def stand_in(word: str, calls: Sequence[ToolCall] = ()) -> Message:
    """Returns the message in place of a turn: `word` stands for its text. Templates put the names
    and ids of its calls into the results."""
    if not calls:
        return {"role": "assistant", "content": word}
    functions = [
        # A name could have a special token's letters.
        {
            "name": call.name if _PLAIN_NAME.fullmatch(call.name) else STAND_IN,
            "arguments": {"value": word},
        }
        for call in calls
    ]
    return {
        "role": "assistant",
        # The word is not here: some templates put the results of calls before the content of the
        # message, others show no content of a message with calls.
        "content": "",
        "tool_calls": [
            {"type": "function", "id": call.id, "function": function}
            for call, function in zip(calls, functions, strict=True)
        ],
    }
