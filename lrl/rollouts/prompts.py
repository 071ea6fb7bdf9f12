"""Data set of prompts with an exact position: one integer tells the past prompts of a run from the
next ones.

All rows are read, checked and tokenised before the first step, so a prompt that is too long or a
misspelt column ends a run in its first minute and not in its tenth hour. The order of an epoch
follows from (seed, epoch) alone, and is not saved. Text is never cut: half a question has no right
answer.
"""

from __future__ import annotations

import logging
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tqdm.auto import tqdm

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
from lrl.rollouts.sources import Row, known_source, read_rows, short_name
from lrl.system.config_errors import fault
from lrl.types import Chat, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PromptPart = Literal["whole", "without header", "first token"]
"""What of a rendered chat is the prompt. With the first token alone an environment writes the chat:
every rendering begins with that token."""
ROWS_WITH_PROGRESS_BAR = (
    5_000  # rows; tokenising fewer takes a second or two and needs no progress bar
)


class Prompts:
    """A data set of prompts: after `load`, `prompts[index]` gives shuffled epochs without end.

    Iteration gives every prompt once, in file order.

    Args:
        source: Short name (gsm8k, math, math500), hub name, file (.jsonl, .json, .csv, .tsv,
            .parquet or .txt, text also compressed as .gz, .zst or .bz2), folder saved by datasets,
            `module:function` (called without arguments, returns rows), or a Python list of rows.
        subset: The hub data set's configuration.
        split: Split of a hub data set or folder; by default the short name's, else "train". A file
            has only one.
        prompt_column: Column with a string or a list of chat messages; by default the short name's,
            else "prompt".
        template: Format string for the prompt (for messages: the last user message) with columns as
            fields, such as "{question} Answer in \\boxed{{}}."; by default the unchanged column.
        system_prompt: System message before the chat.
        chat: Use the tokenizer's chat template: "auto" when it has one, true or false always or
            never.
        shuffle: Whether every epoch has a new order; false keeps file order.
        seed: Seed of the order.
        limit: Number of rows to use, from the first; by default all.
        too_long: What to do with prompts over the token limit: "refuse" to start, or "skip" and
            count them.
        name: Name in metrics and logs; by default the last part of `source`.

    Raises:
        ValueError: A setting is outside its range.
    """

    def __init__(
        self,
        source: str | list[dict[str, Any]],
        *,
        subset: str | None = None,
        split: str | None = None,
        prompt_column: str | None = None,
        template: str | None = None,
        system_prompt: str | None = None,
        chat: bool | Literal["auto"] = "auto",
        shuffle: bool = True,
        seed: int = 0,
        limit: int | None = None,
        too_long: Literal["refuse", "skip"] = "refuse",
        name: str | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            fault(
                f"`limit={limit}` leaves no prompt. Give a positive number, or leave it out for "
                "all rows."
            )
        if seed < 0:
            fault(f"`seed={seed}` of prompts cannot be negative.")
        known = known_source(source)
        self.source = known.source
        self.name = name or short_name(source)
        self.subset = subset or known.subset
        self.split = split or known.split
        self.prompt_column = prompt_column or known.prompt_column
        self.template = template
        self.system_prompt = system_prompt
        self.chat = chat
        self.shuffle = shuffle
        self.seed = seed
        self.too_long = too_long
        self.limit = limit if limit is None or limit > 0 else None
        self.columns: list[str] = []
        """Names of the columns that a `Prompt.columns` may have; known after `load`."""
        self.skipped: list[int] = []
        """Ids of the rows that were skipped as too long."""
        self._fields = template_fields(template) if template is not None else set()
        self.rows: list[Row] = []
        """The raw rows; empty before `read`."""
        self._prompts: list[Prompt] = []
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of the environment's tools; known after `load`."""
        self._part: PromptPart = "whole"
        self._loaded_with: tuple[Any, ...] = ()
        self._order: tuple[int, list[int]] = (-1, [])
        self._whole_forms: set[tuple[Any, ...]] = set()
        """Forms of chats that the chat template renders whole."""
        self._fingerprint = ""

    @classmethod
    def coerce(
        cls, value: Prompts | str | list[dict[str, Any]], *, split: str | None = None
    ) -> Prompts:
        """Returns `value` if it is `Prompts`, else the prompts of a source."""
        return value if isinstance(value, Prompts) else cls(value, split=split)

    @property
    def loaded(self) -> bool:
        """Whether the prompts are tokenised."""
        return bool(self._prompts)

    @property
    def form(self) -> dict[str, Any]:
        """The settings by which a row becomes a prompt, in plain types, and the environment's tools
        if there are some; with the same ones `lrl chat` asks a policy."""
        names = ("prompt_column", "template", "system_prompt", "chat")
        form = {name: getattr(self, name) for name in names}
        return form | {"tools": self.tools} if self.tools else form

    def typed(self, prompt: Prompt) -> str | None:
        """Returns the text that becomes `prompt` by `form`; None if other columns, or several
        messages, do."""
        value = self.rows[prompt.id][self.prompt_column]
        if isinstance(value, list) and len(value) == 1:
            value = value[0].get("content")
        return value if isinstance(value, str) and not self._fields - {self.prompt_column} else None

    def read(self) -> None:
        """Reads the rows and runs the checks that need no tokenizer; does nothing the second time.

        Raises:
            FileNotFoundError: No such file.
            ValueError: The data set cannot be read, is empty, or lacks a column.
        """
        if not self.rows:
            rows = list(islice(self._source_rows(), self.limit))
            self._check(rows)
            self.rows = rows

    def load(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        tools: Sequence[dict[str, Any]] = (),
        part: PromptPart = "whole",
    ) -> None:
        """Reads, checks and tokenises every row; does nothing if the arguments are the same as
        before.

        Args:
            tokenizer: The policy's tokenizer.
            max_prompt_tokens: Longest prompt in tokens, special tokens and chat template included.
            tools: JSON schemas of the environment's tools, for the chat template.
            part: What of a chat is the prompt.

        Raises:
            FileNotFoundError: No such file.
            ValueError: The data set cannot be read, is empty, lacks a column, or has a prompt that
                cannot be used.
        """
        loaded_with = (tokenizer, max_prompt_tokens, list(tools), part)
        if self._loaded_with == loaded_with:
            return
        self.read()
        self.tools = list(tools)
        self._part = part
        prompts = self._tokenise(tokenizer)
        self._prompts = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
        self._order = (-1, [])
        self._report_too_long(
            [p for p in prompts if len(p.token_ids) > max_prompt_tokens], max_prompt_tokens
        )
        told_apart = {(tuple(prompt.token_ids), prompt.text) for prompt in self._prompts}
        if twins := len(self._prompts) - len(told_apart):
            log.warning(
                "%d of the %d prompts of %s repeat another one.",
                twins,
                len(self._prompts),
                self.name,
            )
        self._loaded_with = loaded_with
        self._fingerprint = ""

    def _source_rows(self) -> Iterable[Row]:
        """Returns the rows of the source, in their order."""
        return read_rows(self.source, self.subset, self.split)

    @property
    def fingerprint(self) -> str:
        """A text that changes with the row of prompts: with ids, tokens, their order, `shuffle` and
        `seed`."""
        if not self._fingerprint:
            code = zlib.crc32(f"{self.shuffle} {self.seed}".encode())
            for prompt in self:
                code = zlib.crc32(array("q", [prompt.id, *prompt.token_ids]).tobytes(), code)
                if self._part == "first token":
                    code = zlib.crc32(prompt.text.encode(errors="surrogatepass"), code)
            self._fingerprint = f"{code:08x}"
        return self._fingerprint

    def __len__(self) -> int:
        """Returns the number of prompts in one epoch."""
        if not self._prompts:
            raise RuntimeError(
                f"The prompts of {self.name} are not loaded: call `load(tokenizer, "
                "max_prompt_tokens)`."
            )
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        """Returns the prompt at `index` of the run's endless row: epoch `index // len`, position
        `index % len`."""
        if index < 0:
            raise IndexError(
                f"Prompts are counted from 0 and have no end, so there is no index {index}."
            )
        epoch, position = divmod(index, len(self))
        return self._prompts[self._epoch_order(epoch)[position] if self.shuffle else position]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts[: len(self)])

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            # A run may resume on another numpy, which guarantees the same raw bits for ever, but
            # not `permutation`.
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(len(self))
            self._order = (epoch, np.argsort(bits, kind="stable").tolist())
        return self._order[1]

    def _check(self, rows: list[Row]) -> None:
        if not rows:
            raise ConfigError(
                f"The data set {self.name} is empty (source {self.source!r}, split {self.split!r})."
            )
        for row_id, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ConfigError(
                    f"Row {row_id} of {self.name} is {row!r:.80}, not a dict from column to value."
                )
        columns = list(dict.fromkeys(column for row in rows for column in row))
        if self.prompt_column not in columns:
            raise ConfigError(
                f"The data set {self.name} has no column {self.prompt_column!r}. Its columns: "
                f"{', '.join(columns)}.\nSet `prompt_column` to the one with the question."
            )
        if unknown := sorted(self._fields - set(columns)):
            raise ConfigError(
                f"`template` names {', '.join(unknown)}, but {self.name} has the columns "
                f"{', '.join(columns)}.\nName one of them, or write a brace that is only text "
                f"twice: {{{{ and }}}}."
            )
        self.columns = [column for column in columns if column != self.prompt_column]

    def _tokenise(self, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
        """Returns all rows as prompts; the error names the first wrong row and counts the
        others."""
        chat = self._uses_chat_template(tokenizer)
        self._whole_forms.clear()
        prompts, wrong = [], []
        few = len(self.rows) <= ROWS_WITH_PROGRESS_BAR
        # None: no terminal.
        bar = tqdm(self.rows, desc=f"Tokenising {self.name}", unit="prompt", disable=few or None)
        for row_id, row in enumerate(bar):
            try:
                prompts.append(self._prompt(row_id, row, tokenizer, chat))
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            others = (
                f" {len(wrong) - 1} other rows cannot be used either." if len(wrong) > 1 else ""
            )
            raise ConfigError(wrong[0] + others)
        return prompts

    def _uses_chat_template(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        has_template = bool(tokenizer.chat_template)
        if self.chat is True and not has_template:
            raise ConfigError(
                f"`chat=true`, but the tokenizer {tokenizer.name_or_path!r} has no chat template.\n"
                "Take an instruction-tuned model, set `tokenizer.chat_template`, or use "
                "`chat=auto`."
            )
        chat = has_template and self.chat is not False
        if self.tools and not chat:
            raise ConfigError(
                "data.environment has tools, which a chat template shows the policy, and the "
                f"prompts of {self.name} are plain text: take a model whose tokenizer has a chat "
                f"template that knows tools, and leave `chat={self.chat}` out."
            )
        if self._part == "first token":
            if not chat:
                raise ConfigError(
                    "data.environment writes chats of its own, and the prompts of "
                    f"{self.name} are plain text: take a model whose tokenizer has a chat "
                    f"template, and leave `chat={self.chat}` out."
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

    def _prompt(
        self, row_id: int, row: Row, tokenizer: PreTrainedTokenizerBase, chat: bool
    ) -> Prompt:
        where = f"Row {row_id} of {self.name}, column {self.prompt_column!r}"
        refuse_images(row, f"Row {row_id} of {self.name}")
        messages = messages_of(row.get(self.prompt_column), where)
        if not chat and not isinstance(row[self.prompt_column], str):
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
        if chat:
            whole = self._chat_of(row, messages, tokenizer, f"Row {row_id} of {self.name}")
            token_ids = encode_chat(tokenizer, whole, where, header=self._part == "whole")
            if self._part == "first token":
                token_ids = token_ids[:1]
                whole = Chat([])
        else:
            self._refuse_lost_columns(row, f"Row {row_id} of {self.name}")
            token_ids = encode_text(tokenizer, question["content"], where)
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

    def _chat_of(
        self, row: Row, messages: list[Message], tokenizer: PreTrainedTokenizerBase, where: str
    ) -> Chat:
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
            check_variables(tokenizer, chat, f"{where}, column {VARIABLES!r}")
            check_whole(tokenizer, chat, where, tools_of_environment=bool(self.tools))
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

    def _report_too_long(self, long: list[Prompt], limit: int) -> None:
        self.skipped = [prompt.id for prompt in long]
        if not long:
            return
        rows = ", ".join(map(str, self.skipped[:10])) + (", ..." if len(long) > 10 else "")
        found = (
            f"{len(long)} prompts of {self.name} are longer than max_prompt_tokens={limit}: rows "
            f"{rows}."
        )
        if self.too_long == "refuse" or not self._prompts:
            longest = max(len(prompt.token_ids) for prompt in long)
            raise ConfigError(
                f"{found}\nThe longest has {longest}: raise `max_prompt_tokens`, or use "
                "`too_long=skip`."
            )
        log.warning("%s They are skipped.", found)
