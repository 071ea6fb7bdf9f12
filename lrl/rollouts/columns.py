"""What the columns of a row say: the messages of a chat, its tools, and the fields of a template.

The columns `tools` and `chat_template_kwargs` mean what they mean in TRL's data sets.
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

TOOLS, VARIABLES, IMAGES = "tools", "chat_template_kwargs", ("image", "images")


class _Template(string.Formatter):
    """Fills a format string with a row's columns; a column without a value is an error, not the
    word "None"."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the value of a field such as `hint` or `meta[hint]`, and its column."""
        value, column = super().get_field(field_name, args, kwargs)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise ValueError(f"{field_name} is {'null' if value is None else 'not a number'}")
        return value, column


def filled(template: str, row: dict[str, Any], where: str) -> str:
    """Returns a template with a row's columns; `where` is for the error."""
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
    messages = without_nulls(messages)
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


def tools_of(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
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
    return without_nulls(tools) if tools else []


def without_nulls(value: Any) -> Any:
    """Returns a value without the keys whose value is None, at any depth.

    Arrow gives every dict of a column the same keys, with None where the row had none.
    """
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return value
