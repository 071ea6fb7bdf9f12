"""Prompt texts and tokens of a data set's rows: chat messages, `template`, chat template."""

from __future__ import annotations

import re
import string
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lrl.runtime.config_errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lrl.rollouts.sources import Row

Message = dict[str, Any]


def fill_template(template: str, row: Row, where: str) -> str:
    """Fills `template` with a row's columns; raises a ConfigError that begins with `where`."""
    try:
        return template.format_map(row)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: `template={template!r}` cannot be filled: {error}. Mend template or row."
        ) from error


def template_fields(template: str) -> set[str]:
    """Returns the columns that a template names."""
    remedy = "Name a column in braces, and write a brace that is only text twice: \\boxed{{}}."
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ConfigError(f"`template={template!r}`: {error}. {remedy}") from error
    if not fields or any(not field or field.isdigit() for field in fields):
        raise ConfigError(f"`template={template!r}`: there must be fields, each with a column's name. {remedy}")
    return {re.split(r"[.\[]", field)[0] for field in fields}


def messages_of(value: Any, where: str) -> list[Message]:
    """Returns a column's value as chat messages; a string becomes one user message."""
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ConfigError(f"{where}: a prompt is a string or a list of chat messages, not {value!r:.100}.")
    # Arrow gives every message of a file the same keys, with None where the row had none.
    messages = [{key: part for key, part in message.items() if part is not None} for message in messages]
    questions = [message.get("content") for message in messages if message["role"] == "user"]
    if not questions or not all(isinstance(question, str) and question.strip() for question in questions):
        raise ConfigError(f"{where}: the prompt is empty or not text ({value!r:.100}). Remove or mend the row.")
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{where}: the last message is the assistant's, which the policy is to write. Remove it.")
    return messages


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[Message], chat: bool, where: str) -> list[int]:
    """Returns the token ids of a prompt, up to the beginning of the response.

    Args:
        tokenizer: The policy's tokenizer.
        messages: Chat messages; without `chat` only the text of the last one counts.
        chat: Whether to use the tokenizer's chat template.
        where: Row and column, for errors about the text.

    Raises:
        ConfigError: The chat template refuses the messages, or the tokenizer their text.
    """
    try:
        if not chat:
            text = messages[-1]["content"]
            alone = tokenizer.encode(text, add_special_tokens=False)
            return with_beginning(tokenizer.encode(text), alone)
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        )
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ConfigError(
            f"The tokenizer's chat template refuses messages with the roles {roles}: {error}. Change the messages (or "
            "leave out `system_prompt`), or set `chat=false`."
        ) from error
    except Exception as error:  # the errors of `tokenizers` have no common class
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ConfigError(
            f"{where}: the tokenizer cannot encode it, {_unwritable(messages) or reason}. Mend it."
        ) from error


def with_beginning(added: list[int], alone: list[int]) -> list[int]:
    """Returns the tokens of a plain prompt: the text's, behind what the tokenizer puts before every text (BOS).

    A text that begins so already, such as a rendered chat, does not get it twice. What the tokenizer puts behind every
    text (EOS) is left out: the response would be written behind its own end.

    Args:
        added: Tokens of the text with the tokenizer's special tokens.
        alone: Tokens of the text without them.

    Raises:
        ValueError: The tokenizer puts special tokens into the text.
    """
    starts = (place for place in range(len(added)) if added[place : place + len(alone)] == alone)
    if (start := next(starts, None)) is None:
        raise ValueError(f"with special tokens it is {added}, which does not contain {alone}")
    beginning = added[:start]
    return alone if alone[:start] == beginning else beginning + alone


def _unwritable(messages: list[Message]) -> str:
    """Describes the first character that is not Unicode text: no tokenizer accepts JSON's \\ud800."""
    for message in messages:
        for place, letter in enumerate(message["content"] if isinstance(message["content"], str) else ""):
            if "\ud800" <= letter <= "\udfff":
                return f"character {place} of the {message['role']} message is {letter!a}, half of a surrogate pair"
    return ""
