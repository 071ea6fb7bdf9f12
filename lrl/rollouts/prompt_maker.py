"""A prompt made of one row: its messages, its template, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

from lrl.environments.base import Message
from lrl.errors import ConfigError
from lrl.rollouts.chat_template import (
    check_variables,
    check_whole,
    encode_chat,
    encode_text,
)
from lrl.rollouts.prompt_columns import (
    TOOLS,
    VARIABLES,
    fill_template,
    messages_of,
    refuse_images,
    template_fields,
    tools_of,
    variables_of,
)
from lrl.rollouts.source_files import Row
from lrl.types import Chat, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        self._fields = template_fields(self.template) if self.template is not None else set()
        self._renders = self._uses_chat_template()
        self._whole_forms: set[tuple[Any, ...]] = set()
        """Forms of chats that the chat template renders whole."""

    def __call__(self, row_id: int, row: Row) -> Prompt:
        """Returns the prompt of a row; raises ConfigError if it cannot be used."""
        where = f"Row {row_id} of {self.name}, column {self.prompt_column!r}"
        refuse_images(row, f"Row {row_id} of {self.name}")
        messages = messages_of(row.get(self.prompt_column), where)
        if not self._renders and messages != [{"role": "user", "content": row[self.prompt_column]}]:
            raise ConfigError(
                f"{where}: chat messages need a tokenizer with a chat template "
                f"(`chat={self.chat}`)."
            )
        question = [message for message in messages if message["role"] == "user"][-1]
        if self.template is not None:
            if lacking := self._fields - row.keys():
                raise ConfigError(
                    f"Row {row_id} of {self.name} lacks {', '.join(lacking)}, which `template` "
                    "names."
                )
            question["content"] = fill_template(
                self.template, row | {self.prompt_column: question["content"]}, where
            )
        whole = None
        if self._renders:
            whole = self._chat_of(row, messages, f"Row {row_id} of {self.name}")
            token_ids = encode_chat(self.tokenizer, whole, where, header=self.part == "whole")
            if self.part == "first token":
                token_ids = token_ids[:1]
                whole = Chat([], variables=whole.variables)
        else:
            self._refuse_lost_columns(row, f"Row {row_id} of {self.name}")
            token_ids = encode_text(self.tokenizer, question["content"], where)
        columns = {
            column: content for column, content in row.items() if column != self.prompt_column
        }
        return Prompt(
            id=row_id,
            token_ids=token_ids,
            text=question["content"],
            columns=columns,
            chat=whole,
        )

    def _uses_chat_template(self) -> bool:
        has_template = bool(self.tokenizer.chat_template)
        if self.chat is True and not has_template:
            raise ConfigError(
                f"`chat=true`, but the tokenizer {self.tokenizer.name_or_path!r} has no chat "
                "template.\nTake an instruction-tuned model, set `tokenizer.chat_template`, or use "
                "`chat=auto`."
            )
        chat = has_template and self.chat is not False
        if self.tools and not chat:
            raise ConfigError(
                "data.environment has tools, which a chat template shows the policy, and the "
                f"prompts of {self.name} are plain text: {self._have_chats()} that knows tools."
            )
        if self.part == "first token":
            if not chat:
                raise ConfigError(
                    "data.environment writes chats of its own, and the prompts of "
                    f"{self.name} are plain text: {self._have_chats()}."
                )
            if self.system_prompt:
                raise ConfigError(
                    f"`system_prompt` of {self.name} reaches nobody: data.environment writes the "
                    "chats, with the system message. Leave it out."
                )
        if self.system_prompt and not chat:
            raise ConfigError(
                "`system_prompt` needs a chat template; for plain text put its words into "
                "`template`."
            )
        return chat

    def _have_chats(self) -> str:
        """Returns the remedy of plain prompts where chats are needed."""
        if self.tokenizer.chat_template:
            return f"leave `chat={self.chat}` out, and take a model with a chat template"
        return (
            f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template. Take a model of "
            "which the tokenizer has a chat template"
        )

    def _chat_of(self, row: Row, messages: list[Message], where: str) -> Chat:
        where_text = f"{where}, column {self.prompt_column!r}"
        if self.system_prompt:
            if messages[0]["role"] == "system":
                raise ConfigError(
                    f"{where_text}: the row has a system message of its own. Leave `system_prompt` "
                    "out."
                )
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        # `template` has rendered them.
        tools = [] if TOOLS in self._fields else tools_of(row, where)
        if tools and self.tools:
            raise ConfigError(
                f"{where}, column {TOOLS!r}: data.environment has tools of its own, and would not "
                "run those of the row. Leave the column out, or rename it if only the rewards read "
                "it."
            )
        chat = Chat(messages, self.tools or tools, variables_of(row, where))
        form = (*((one["role"], *one) for one in messages), bool(tools), *chat.variables)
        if form not in self._whole_forms:
            check_variables(self.tokenizer, chat, f"{where}, column {VARIABLES!r}")
            check_whole(self.tokenizer, chat, where, tools_of_environment=bool(self.tools))
            self._whole_forms.add(form)
        return chat

    def _refuse_lost_columns(self, row: Row, where: str) -> None:
        """Raises a ConfigError if a plain prompt lacks columns that only a chat template renders,
        unless `chat` is false."""
        if self.chat is False:
            return
        for column in (TOOLS, VARIABLES):
            if row.get(column) and column not in self._fields:
                raise ConfigError(
                    f"{where}, column {column!r}: the tokenizer has no chat template, which would "
                    "render it. Take an instruction-tuned model, or set chat=false for prompts "
                    "without it."
                )
