"""Text and tokens of a policy: of a prompt, by the chat template or plain, and of a response, by
one rule for generators, rewards, evaluations, logs and `lrl chat`.

A chat template may leave out what its authors did not think of: a system message, tools. A chat of
which a part does not reach the text is refused; errors do not name the row or the observation, as
the caller does. The form of a run's prompts is kept in the policy's folder for `lrl chat`.

A response ends where vLLM would end it when it serves the exported policy. A request names these
tokens, and vLLM adds none of its own.
"""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.environments.base import Message, parsed_arguments
from lrl.errors import ConfigError
from lrl.system.output import writable
from lrl.types import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lrl.environments import Environment

TOOLS, VARIABLES = "tools", "chat_template_kwargs"
"""Columns of a row; they mean what they mean in TRL's data sets."""
CHANGE_MARK = " (changed)"
"""Added to a part of a chat, to see whether the text changes with it."""
FORM_FILE = "prompt_form.json"
"""The file of `Prompts.form`, in the policy's folder."""
_OPENED = re.compile(r"([<◁]\|?(?!assistant|model|bot)\w[\w:-]*\|?[>▷])\s*\Z", re.IGNORECASE)
_THINKS = re.compile("think|thought|reason", re.IGNORECASE)
_LONGEST_TAG = 16
"""In tokens."""
_NO_CHARACTER = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens that may be parts of one character; with more of them, their bytes are no character."""


def form_of(data: Any) -> dict[str, Any]:
    """Returns the form of a data module's prompts; empty for one that is not lrl's."""
    return dict(getattr(getattr(data, "prompts", None), "form", {}))


def save_form(form: dict[str, Any], folder: Path) -> None:
    """Writes the form into the folder of a policy; an empty one leaves no file."""
    if form:
        text = writable(json.dumps(form, indent=2, ensure_ascii=False))
        (folder / FORM_FILE).write_text(f"{text}\n", encoding="utf-8")


def read_form(folder: Path) -> dict[str, Any]:
    """Returns the form in the folder of a policy; empty for one that lrl has not trained."""
    path = folder / FORM_FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


# ---- a row's chat


def messages_of(value: Any) -> list[Message]:
    """Returns a column's value as chat messages, which may be JSON text; other text becomes one
    user message."""
    messages = value
    if isinstance(value, str):
        messages = _stored_messages(value) or [{"role": "user", "content": value}]
    if not _are_messages(messages):
        raise ConfigError(f"a prompt is a string or a list of chat messages, not {value!r:.100}.")
    messages = without_nulls(messages)
    for message in messages:
        content = message.get("content", "")
        is_question = message["role"] == "user"
        if not isinstance(content, str) or (is_question and not content.strip()):
            raise ConfigError(
                f"the {message['role']} message is empty or not text ({content!r:.100})."
            )
    roles = [message["role"] for message in messages]
    if "user" not in roles or roles[-1] == "assistant":
        raise ConfigError(
            "a chat has a user's message and does not end with the assistant's, which the policy "
            f"is to write; its roles are {', '.join(roles)}."
        )
    return messages


def _stored_messages(text: str) -> list[Message] | None:
    """Returns the messages of their JSON text, or of Python's as pandas writes it."""
    if not text.lstrip().startswith("[") or "role" not in text:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text.strip())
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if _are_messages(found) else None
    return None


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value)


def tools_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the tools in the column `tools`: JSON schemas, or their JSON text."""
    value = tools = row.get(TOOLS)
    with suppress(json.JSONDecodeError):
        tools = json.loads(value) if isinstance(value, str) else value
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError(
            f"column {TOOLS!r}: {value!r:.100} is no list of JSON schemas, which a chat template "
            "renders. Rename the column if only the rewards read it."
        )
    return without_nulls(tools) if tools else []


def without_nulls(value: Any) -> Any:
    """Returns a value without keys of None, at any depth: Arrow gives every dict of a column the
    same keys, with None where the row had none."""
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return value


# ---- a prompt's tokens


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the tokens of a text, without special tokens of its own; raises ConfigError if the
    tokenizer cannot encode it, as half of a surrogate pair."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the errors of `tokenizers` have no common class
        raise ConfigError(
            f"the tokenizer cannot encode {text!r:.100}: {type(error).__name__}: {error}"
        ) from error


def with_beginning(added: list[int], alone: list[int]) -> list[int]:
    """Returns the tokens of a plain prompt: the text's, after what the tokenizer puts before every
    text (BOS), unless it begins so already, and without what it puts after every text (EOS).
    `added` are the text's tokens with the tokenizer's special tokens, `alone` without them."""
    starts = (index for index in range(len(added)) if added[index : index + len(alone)] == alone)
    if (start := next(starts, None)) is None:
        raise ConfigError(
            f"the tokenizer cannot encode it: with special tokens it is {added}, which does not "
            f"contain {alone}."
        )
    beginning = added[:start]
    return alone if alone[:start] == beginning else beginning + alone


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, *, header: bool = True
) -> list[int]:
    return encode(tokenizer, render_chat(tokenizer, chat, header=header))


def render_chat(tokenizer: PreTrainedTokenizerBase, chat: Chat, *, header: bool = True) -> str:
    """Returns a chat as the chat template writes it, up to the beginning of the response, with its
    `header` (`add_generation_prompt`) or without; raises ConfigError if the template refuses it."""
    try:
        text: Any = tokenizer.apply_chat_template(
            [_with_arguments(message) for message in chat.messages],
            tools=list(chat.tools) or None,
            tokenize=False,
            add_generation_prompt=header,
            **chat.variables,
        )
    except Exception as error:  # a template is a program, which may raise anything
        roles = ", ".join(str(message["role"]) for message in chat.messages)
        tools = " and the column 'tools'" if chat.tools else ""
        raise ConfigError(
            f"the tokenizer's chat template refuses messages with the roles {roles}{tools}: "
            f"{error}. Change them (or leave out `system_prompt`), or set `chat=false`."
        ) from error
    return str(text)


class _Arguments(dict[str, Any]):
    """The arguments of a call for any chat template: most want a dict, and some their JSON text,
    which they write out or add to other text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def _with_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for function in (call.get("function", call) for call in calls):
        if isinstance(arguments := parsed_arguments(function.get("arguments")), dict):
            function["arguments"] = _Arguments(arguments)
    return message | {"tool_calls": calls}


def check_whole(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> None:
    """Raises a ConfigError if the chat template leaves out a variable or a part of the chat."""
    template = tokenizer.get_chat_template(tools=list(chat.tools) or None) if chat.variables else ""
    for name in chat.variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"column {VARIABLES!r}: the tokenizer's chat template has no variable {name!r}. "
                "Leave it out."
            )
    parts = [("the tools", chat._replace(tools=()))] if chat.tools else []
    for index, message in enumerate(chat.messages):
        changes: Message = {}
        if content := message.get("content"):
            changes["content"] = content + CHANGE_MARK
        if message.get("tool_calls"):
            changes["tool_calls"] = calls = copy.deepcopy(message["tool_calls"])
            function = calls[-1].get("function", calls[-1])
            function["name"] = f"{function.get('name')}{CHANGE_MARK}"
        for name, change in changes.items():
            messages = list(chat.messages)
            messages[index] = message | {name: change}
            part = f"the {name} of the {message['role']} message"
            parts.append((part, chat._replace(messages=messages)))
    text = render_chat(tokenizer, chat)
    for part, changed in parts:
        if render_chat(tokenizer, changed) == text:
            raise ConfigError(
                f"the tokenizer's chat template leaves out {part}. Put it into `template`, or take "
                "a model whose chat template knows it."
            )


# ---- a response's text


@dataclass(frozen=True, kw_only=True)
class PolicyText:
    """A policy's tokenizer, and the text that its tokens are for rewards, environments and logs.

    A tag that stands open before a response, such as the `<think>` of many chat templates, is the
    beginning of its text (`prepend_opened_tag`): the response has only the closing one.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    """The tokens at which responses end; they never come into a text."""
    skip_special_tokens: bool = False
    """Whether to leave out all other special tokens, too."""
    prepend_opened_tag: bool = True
    shown: set[tuple[Any, ...]] = field(default_factory=set, compare=False)
    """Forms of chats that the chat template shows whole."""

    @cached_property
    def _left_out(self) -> frozenset[int]:
        return ends_of_text(self.tokenizer, self.ends)

    def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Returns the text of a response, or of a part of it, that follows the tokens `before`."""
        kept = [token for token in token_ids if token not in self._left_out]
        opened = self._opened(before[-_LONGEST_TAG:]) if self.prepend_opened_tag else ""
        return opened + decoded(self.tokenizer, kept, self.skip_special_tokens)

    def _opened(self, before: Sequence[int]) -> str:
        tag = _OPENED.search(decoded(self.tokenizer, before))
        if tag is None:
            return ""
        # Other special tokens that look like a tag are a header, or the beginning of the text.
        special = tag[1] in self.tokenizer.all_special_tokens
        skipped = special and (self.skip_special_tokens or not _THINKS.search(tag[1]))
        return "" if skipped else tag[0]


class TokenTexts:
    """The text of each token of a sequence (`lrl view`); together they are the text of the
    sequence. Of tokens that are parts of one character, the last one has it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # Behind another token: some tokenizers leave out the space at the beginning of a text.
        every = range(len(tokenizer))
        words = ([one] for one in every if decoded(tokenizer, [one]).strip().isalnum())
        before = next(words, [])
        skipped = len(decoded(tokenizer, before))
        self._text = cache(lambda parts: decoded(tokenizer, [*before, *parts])[skipped:])

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        found: list[str] = []
        parts: tuple[int, ...] = ()
        for token in token_ids:
            parts = (*parts, token)
            text = self._text(parts)
            if text.endswith(_NO_CHARACTER) and len(parts) < _LONGEST_CHARACTER:
                found.append("")
            else:
                found.append(text)
                parts = ()
        if parts:
            found[-1] = self._text(parts)
        return found


def decoded(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """Returns the text of tokens with their spaces: some tokenizers make `x!= y` of `x != y`."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return str(text)


def stop_tokens(tokenizer: PreTrainedTokenizerBase, folder: str) -> frozenset[int]:
    """Returns the tokens at which the responses of the policy in a folder, or of that hub name,
    end: the tokenizer's end and the ends of generation_config.json, or else of config.json."""
    from transformers import AutoConfig, GenerationConfig  # here: `lrl chat` should answer at once

    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none, or it is no JSON
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    named: Any = generation.eos_token_id
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return frozenset(ends - {None})


def ends_of_text(tokenizer: PreTrainedTokenizerBase, stop_tokens: frozenset[int]) -> frozenset[int]:
    """Returns the tokens that begin, end or fill up a text, and belong to no response."""
    return (stop_tokens | {tokenizer.bos_token_id, tokenizer.pad_token_id}) - {None}


def turn_stop_tokens(
    tokenizer: PreTrainedTokenizerBase, environment: Environment
) -> tuple[int, ...]:
    """Returns the tokens of `environment.stop`."""
    stop: Any = environment.stop
    found = []
    for text in (stop,) if isinstance(stop, str) else stop:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"data.environment: {type(environment).__name__}.stop has {text!r}, which is "
                f"{len(ids)} tokens of the policy: a turn ends at one token. Name one."
            )
        found += ids
    return tuple(found)
