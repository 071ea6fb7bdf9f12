"""A prompt made of one row: its messages, its template, and its tokens.

The columns `tools` and `chat_template_kwargs` mean what they mean in TRL's data sets. What would be
left out of the prompt silently is refused: images, messages and columns without a chat template.
"""

from __future__ import annotations

import ast
import json
import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

from lrl.environments.base import Message
from lrl.errors import ConfigError
from lrl.rollouts.chat_template import check_variables, check_whole, encode_chat, encode_text
from lrl.rollouts.prompts.sources import Row
from lrl.types import Chat, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS, VARIABLES, IMAGES = "tools", "chat_template_kwargs", ("image", "images")

PromptPart = Literal["whole", "without header", "first token"]
"""What of a rendered chat is the prompt. With the first token alone an environment writes the chat:
every rendering begins with that token."""


@dataclass
class PromptMaker:
    """Makes the prompts of a data set, row by row.

    Args:
        tokenizer: The policy's.
        name: The data set's, in errors.
        prompt_column, template, system_prompt, chat: See `lrl.Prompts`.
        tools: JSON schemas of the environment's tools, for the chat template.
        part: What of a chat is the prompt.

    Raises:
        ConfigError: The tokenizer has no chat template, and a setting needs one.
    """

    tokenizer: PreTrainedTokenizerBase
    _: KW_ONLY
    name: str
    prompt_column: str
    template: str | None
    system_prompt: str | None
    chat: bool | Literal["auto"]
    tools: Sequence[dict[str, Any]]
    part: PromptPart

    def __post_init__(self) -> None:
        self._fields = template_fields(self.template)
        self._renders = bool(self.tokenizer.chat_template) and self.chat is not False
        self._whole_forms: set[tuple[Any, ...]] = set()
        """Forms of chats that the chat template renders whole."""
        needs = {
            "`chat=true`": self.chat is True,
            "`system_prompt`": self.system_prompt,
            "data.environment with tools": self.tools,
            "data.environment, which writes the chats,": self.part == "first token",
        }
        for setting, needed in needs.items():
            if needed and not self._renders:
                raise ConfigError(
                    f"{setting} needs a chat template, and the prompts of {self.name} are plain "
                    f"text: `chat={self.chat}`, and the tokenizer {self.tokenizer.name_or_path!r} "
                    f"{'has one' if self.tokenizer.chat_template else 'has none'}."
                )
        if self.part == "first token" and self.system_prompt:
            raise ConfigError(
                f"`system_prompt` of {self.name} reaches nobody: data.environment writes the chats, "
                "with the system message. Leave it out."
            )

    def __call__(self, row_id: int, row: Row) -> Prompt:
        """Returns the prompt of a row; raises ConfigError if it cannot be used."""
        in_row = f"Row {row_id} of {self.name}"
        where = f"{in_row}, column {self.prompt_column!r}"
        for column in IMAGES:
            if (image := row.get(column)) is not None and image != []:
                raise ConfigError(f"{in_row}, column {column!r}: lrl trains on text alone.")
        messages = messages_of(row.get(self.prompt_column), where)
        question = [message for message in messages if message["role"] == "user"][-1]
        if not self._renders:
            self._refuse_lost(row, messages, in_row)
        if self.template is not None:
            content = {self.prompt_column: question["content"]}
            question["content"] = _filled(self.template, row | content, where)
        chat = None
        if self._renders:
            chat = self._chat_of(row, messages, in_row)
            token_ids = encode_chat(self.tokenizer, chat, where, header=self.part == "whole")
            if self.part == "first token":
                token_ids = token_ids[:1]
                chat = Chat([], variables=chat.variables)
        else:
            token_ids = encode_text(self.tokenizer, question["content"], where)
        return Prompt(
            id=row_id,
            token_ids=token_ids,
            text=question["content"],
            columns={name: value for name, value in row.items() if name != self.prompt_column},
            chat=chat,
        )

    def _refuse_lost(self, row: Row, messages: list[Message], where: str) -> None:
        """Raises a ConfigError if only a chat template would render a part of the row."""
        lost = []
        if messages != [{"role": "user", "content": row[self.prompt_column]}]:
            lost = [self.prompt_column]
        elif self.chat is not False:  # else the columns are the rewards'
            columns = (name for name in (TOOLS, VARIABLES) if row.get(name))
            lost = [name for name in columns if name not in self._fields]
        if lost:
            raise ConfigError(
                f"{where}, column {lost[0]!r}: only a chat template renders it, and the prompts "
                f"are plain text (`chat={self.chat}`). Take a tokenizer with a chat template, or "
                "set `chat=false` if only the rewards read it."
            )

    def _chat_of(self, row: Row, messages: list[Message], where: str) -> Chat:
        if self.system_prompt:
            if messages[0]["role"] == "system":
                raise ConfigError(
                    f"{where}, column {self.prompt_column!r}: the row has a system message of its "
                    "own. Leave `system_prompt` out."
                )
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        # `template` has rendered them.
        tools = [] if TOOLS in self._fields else _tools_of(row, where)
        if tools and self.tools:
            raise ConfigError(
                f"{where}, column {TOOLS!r}: data.environment has tools of its own, and would not "
                "run those of the row. Leave the column out."
            )
        chat = Chat(messages, self.tools or tools, _without_nulls(row.get(VARIABLES) or {}))
        form = (*((one["role"], *one) for one in messages), bool(tools), *chat.variables)
        if form not in self._whole_forms:
            whose = "the tools of data.environment" if self.tools else f"the column {TOOLS!r}"
            check_variables(self.tokenizer, chat, f"{where}, column {VARIABLES!r}")
            check_whole(self.tokenizer, chat, where, whose)
            self._whole_forms.add(form)
        return chat


class _Template(string.Formatter):
    """Fills a format string with a row's columns; a column without a value is an error, not the
    word "None"."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the value of a field such as `hint` or `meta[hint]`, and its column."""
        value, column = super().get_field(field_name, args, kwargs)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise ValueError(f"{field_name} is {'null' if value is None else 'not a number'}")
        return value, column


def _filled(template: str, row: Row, where: str) -> str:
    try:
        return _Template().vformat(template, (), row)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: `template={template!r}` cannot be filled: {error}.") from error


def template_fields(template: str | None) -> set[str]:
    """Returns the columns that a template names; none without a template."""
    if template is None:
        return set()
    try:
        parsed = list(string.Formatter().parse(template))
        if not (fields := {re.split(r"[.\[]", field)[0] for _, field, _, _ in parsed if field}):
            raise ValueError("it names no column")
    except ValueError as error:
        raise ConfigError(
            f"`template={template!r}`: {error}. Name columns in braces, and write a brace that is "
            "only text twice: \\boxed{{}}."
        ) from error
    return fields


def messages_of(value: Any, where: str) -> list[Message]:
    """Returns a column's value as chat messages, which may be JSON text; other text becomes one
    user message."""
    messages = value
    if isinstance(value, str):
        messages = _stored_messages(value) or [{"role": "user", "content": value}]
    if not _are_messages(messages):
        raise ConfigError(
            f"{where}: a prompt is a string or a list of chat messages, not {value!r:.100}."
        )
    messages = _without_nulls(messages)
    for message in messages:
        content = message.get("content", "")
        is_question = message["role"] == "user"
        if not isinstance(content, str) or (is_question and not content.strip()):
            raise ConfigError(
                f"{where}: the {message['role']} message is empty or not text ({content!r:.100})."
            )
    roles = [message["role"] for message in messages]
    if "user" not in roles or roles[-1] == "assistant":
        raise ConfigError(
            f"{where}: a chat has a user's message and does not end with the assistant's, which "
            f"the policy is to write; its roles are {', '.join(roles)}."
        )
    return messages


def _stored_messages(text: str) -> list[Message]:
    """Returns the messages of their JSON text, or of Python's as pandas writes it; none of another
    text."""
    if not text.lstrip().startswith("[") or "role" not in text:
        return []
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text.strip())
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if _are_messages(found) else []
    return []


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(m, dict) and "role" in m for m in value)


def _tools_of(row: Row, where: str) -> list[dict[str, Any]]:
    """Returns the tools in the column `tools`: JSON schemas, or their JSON text."""
    value = row.get(TOOLS)
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
    except json.JSONDecodeError:
        tools = value
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError(
            f"{where}, column {TOOLS!r}: {value!r:.100} is no list of JSON schemas, which a chat "
            "template renders. Rename the column if only the rewards read it."
        )
    return _without_nulls(tools) if tools else []


def _without_nulls(value: Any) -> Any:
    """Returns a value without the keys whose value is None, at any depth.

    Arrow gives every dict of a column the same keys, with None where the row had none.
    """
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return value
