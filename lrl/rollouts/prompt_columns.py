"""Columns of a row that make its prompt: text or messages, `template`, and those that TRL's data
sets know.

Those are `tools` and `chat_template_kwargs`, which a chat template reads, and `image` and `images`,
which no prompt of text can show.
"""

from __future__ import annotations

import ast
import json
import math
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from lrl.environments.base import Message
from lrl.errors import ConfigError
from lrl.rollouts.source_files import Row

TOOLS, VARIABLES, IMAGES = "tools", "chat_template_kwargs", ("image", "images")


class Template(string.Formatter):
    """Fills a format string with a row's columns; a column without a value is an error, not the
    word "None"."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the value of a field such as `hint` or `meta[hint]`, and its column."""
        value, column = super().get_field(field_name, args, kwargs)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise ValueError(f"{field_name} is {'null' if value is None else 'not a number'}")
        return value, column


def fill_template(template: str, row: Row, where: str) -> str:
    """Fills `template` with a row's columns; raises a ConfigError that begins with `where`."""
    try:
        return Template().vformat(template, (), row)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: `template={template!r}` cannot be filled: {error}. Mend template or row."
        ) from error


def template_fields(template: str) -> set[str]:
    """Returns the columns that a template names."""
    remedy = "Name a column in braces, and write a brace that is only text twice: \\boxed{{}}."
    try:
        fields = [
            field for _, field, _, _ in string.Formatter().parse(template) if field is not None
        ]
    except ValueError as error:
        raise ConfigError(f"`template={template!r}`: {error}. {remedy}") from error
    if not fields or any(not field or field.isdecimal() for field in fields):
        raise ConfigError(
            f"`template={template!r}`: there must be fields, each with a column's name. {remedy}"
        )
    return {re.split(r"[.\[]", field)[0] for field in fields}


def messages_of(value: Any, where: str) -> list[Message]:
    """Returns a column's value as chat messages, which may be JSON text; other text becomes one
    user message."""
    messages = value
    if isinstance(value, str):
        messages = _stored_messages(value) or [{"role": "user", "content": value}]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and "role" in m for m in messages
    ):
        raise ConfigError(
            f"{where}: a prompt is a string or a list of chat messages, not {value!r:.100}."
        )
    messages = _without_nulls(messages)
    questions = [message.get("content") for message in messages if message["role"] == "user"]
    if not questions or not all(
        isinstance(question, str) and question.strip() for question in questions
    ):
        raise ConfigError(
            f"{where}: the prompt is empty or not text ({value!r:.100}). Remove or mend the row."
        )
    for message in messages:
        content = message.get("content", "")
        if not isinstance(content, str):
            raise ConfigError(
                f"{where}: the {message['role']} message is not text ({content!r:.100}). Mend it."
            )
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where}: the last message is the assistant's, which the policy is to write. Remove "
            "it."
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
        return found if all(isinstance(one, dict) and "role" in one for one in found) else []
    return []


def tools_of(row: Row, where: str) -> list[dict[str, Any]]:
    """Returns the tools in the column `tools`: JSON schemas, or their JSON text; empty if it has
    none."""
    value = row.get(TOOLS)
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
    except json.JSONDecodeError:
        tools = value
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f"{where}, column {TOOLS!r}: {value!r:.100} is no list of JSON schemas, which a chat "
            "template renders. Mend it, or rename the column if only the rewards read it."
        )
    return _without_nulls(tools)


def variables_of(row: Row, where: str) -> dict[str, Any]:
    """Returns the variables in the column `chat_template_kwargs`; empty if it has none."""
    value = row.get(VARIABLES) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where}, column {VARIABLES!r}: {value!r:.100} is no dict. Mend it.")
    return _without_nulls(value)


def refuse_images(row: Row, where: str) -> None:
    """Raises a ConfigError if the row has an image."""
    for column in IMAGES:
        value = row.get(column)
        if value is None or (isinstance(value, list) and not value):
            continue
        raise ConfigError(
            f"{where}, column {column!r}: lrl trains on text alone, so the policy would not see "
            "the image. Give rows without it, from a file or a function (module:function)."
        )


def _without_nulls(value: Any) -> Any:
    """Returns a value without the keys whose value is None, at any depth.

    Arrow gives every dict of a column the same keys, with None where the row had none.
    """
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return value
