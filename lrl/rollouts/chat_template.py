"""Tokens of a prompt: a chat through the tokenizer's chat template, or a plain text.

A chat template may leave out what its authors did not think of: a system message, tools. A chat of
which a part does not reach the text is refused. The form of a run's prompts is kept in the policy's
folder for `lrl chat`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.environments.base import Message, parsed_arguments
from lrl.errors import ConfigError
from lrl.system.best_effort import writable
from lrl.types import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHANGE_MARK = " (changed)"
"""Added to a part of a chat, to see whether the text changes with it."""
FORM_FILE = "prompt_form.json"
"""The file of `Prompts.form`, in the policy's folder."""


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


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> list[int]:
    """Returns the token ids of a prompt of plain text; raises ConfigError, which names `where`, if
    the tokenizer refuses it."""
    with named_errors(where):
        alone = tokenizer.encode(text, add_special_tokens=False)
        return with_beginning(tokenizer.encode(text), alone)


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, where: str, *, header: bool = True
) -> list[int]:
    """Returns the token ids of a chat; see `render_chat`."""
    text = render_chat(tokenizer, chat, where, header=header)
    with named_errors(where):
        return tokenizer.encode(text, add_special_tokens=False)


def render_chat(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, where: str, *, header: bool = True
) -> str:
    """Returns a chat as the chat template writes it, up to the beginning of the response, with its
    `header` (`add_generation_prompt`) or without; raises ConfigError, which names `where`, if the
    template refuses the chat."""
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
            f"{where}: the tokenizer's chat template refuses messages with the roles "
            f"{roles}{tools}: {error}. Change them (or leave out `system_prompt`), or set "
            "`chat=false`."
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


def with_beginning(added: list[int], alone: list[int]) -> list[int]:
    """Returns the tokens of a plain prompt: the text's, after what the tokenizer puts before every
    text (BOS).

    A text that begins so already, such as a rendered chat, does not get it twice. What the
    tokenizer puts after every text (EOS) is left out: the response would be written after its own
    end. `added` are the text's tokens with the tokenizer's special tokens, `alone` without them;
    raises ValueError if it puts some into the text.
    """
    starts = (index for index in range(len(added)) if added[index : index + len(alone)] == alone)
    if (start := next(starts, None)) is None:
        raise ValueError(f"with special tokens it is {added}, which does not contain {alone}")
    beginning = added[:start]
    return alone if alone[:start] == beginning else beginning + alone


def check_variables(tokenizer: PreTrainedTokenizerBase, chat: Chat, where: str) -> None:
    """Raises a ConfigError if the chat template does not know one of the chat's variables."""
    template = tokenizer.get_chat_template(tools=list(chat.tools) or None) if chat.variables else ""
    for name in chat.variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"{where}: the tokenizer's chat template has no variable {name!r}. Leave it out."
            )


def check_whole(tokenizer: PreTrainedTokenizerBase, chat: Chat, where: str, tools: str) -> None:
    """Raises a ConfigError if a part of the chat does not reach the text; `tools` says what its
    tools are."""
    text = render_chat(tokenizer, chat, where)
    for part, changed in _with_one_change(chat, tools):
        if render_chat(tokenizer, changed, where) == text:
            raise ConfigError(
                f"{where}: the tokenizer's chat template leaves out {part}. Put it into `template`, "
                "or take a model whose chat template knows it."
            )


def _with_one_change(chat: Chat, tools: str) -> Iterator[tuple[str, Chat]]:
    """Yields each part of the chat, and the chat with that part changed."""
    for index, message in enumerate(chat.messages):
        changes: list[Message] = []
        if content := message.get("content"):
            changes.append({"content": content + CHANGE_MARK})
        for number, call in enumerate(message.get("tool_calls", ())):
            if "name" in call.get("function", call):
                calls = copy.deepcopy(message["tool_calls"])
                calls[number].get("function", calls[number])["name"] += CHANGE_MARK
                changes.append({"tool_calls": calls})
        for change in changes:
            messages = [*chat.messages[:index], message | change, *chat.messages[index + 1 :]]
            part = f"the {next(iter(change))} of the {message['role']} message"
            yield part, chat._replace(messages=messages)
    if chat.tools:
        yield tools, chat._replace(tools=())


@contextmanager
def named_errors(where: str) -> Iterator[None]:
    """Turns exceptions of the tokenizer into a ConfigError."""
    try:
        yield
    except Exception as error:  # the errors of `tokenizers` have no common class
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        if isinstance(error, TypeError):
            reason = "half of a surrogate pair (such as JSON's \\ud800)"
        raise ConfigError(f"{where}: the tokenizer cannot encode it, {reason}.") from error
