"""Data set of prompts, of which one integer tells the past ones of a run from the next.

All rows are read, checked and tokenised before the first step, so a misspelt column ends a run in
its first minute. The order of an epoch follows from (seed, epoch) alone, and is not saved. Text is
never cut: half a question has no right answer. What would be left out of a prompt silently is
refused: images, and messages and columns without a chat template.
"""

from __future__ import annotations

import logging
import math
import re
import string
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from tqdm.auto import tqdm

from lrl.environments.base import Environment, Message
from lrl.errors import ConfigError, at_least, one_of
from lrl.rollouts import policy_text
from lrl.rollouts.policy_text import TOOLS, VARIABLES
from lrl.rollouts.sources import Row, known_source, read_rows
from lrl.types import Chat, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
TooLong = Literal["refuse", "skip"]
IMAGES = ("image", "images")


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
        too_long: TooLong = "refuse",
        name: str | None = None,
    ) -> None:
        at_least(0, "Prompts", seed=seed)
        words = {"chat": ((True, False, "auto"), chat), "too_long": (get_args(TooLong), too_long)}
        one_of(type(self).__name__, **words)
        known = known_source(source)
        self.source = known.source
        self.name = name or known.name
        self.subset = subset or known.subset
        self.split = split or known.split
        self.prompt_column = prompt_column or known.prompt_column
        self.template = template
        self.system_prompt = system_prompt
        self.chat = chat
        self.shuffle = shuffle
        self.seed = seed
        self.too_long = too_long
        self.limit = limit
        self.columns: list[str] = []
        """Names of the columns that a `Prompt.columns` may have; known after `load`."""
        self._fields = _fields_of(template)
        self.rows: list[Row] = []
        """The raw rows; empty before `read`."""
        self._prompts: list[Prompt] = []
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of the environment's tools; known after `load`."""
        self._environment: Environment | None = None
        self._renders = False
        self._whole_forms: set[tuple[Any, ...]] = set()
        """Forms of chats that the chat template renders whole."""
        self._loaded_with: tuple[Any, ...] = ()
        self._order: tuple[int, list[int]] = (-1, [])
        self.fingerprint = ""
        """A text that changes with the prompts or their order; known after `load`."""

    @classmethod
    def coerce(cls, value: Any, *, split: str | None = None) -> Prompts:
        """Returns `value` if it is `Prompts`, else the prompts of a source."""
        return value if isinstance(value, Prompts) else cls(value, split=split)

    @property
    def _is_agents(self) -> bool:
        """Whether the environment writes the chat; only its first token is the prompt then."""
        return self._environment is not None and self._environment.writes_prompt

    @property
    def form(self) -> dict[str, Any]:
        """The settings by which a row becomes a prompt, in plain types, and the environment's
        tools: `lrl chat` asks the policy by them. The system message is the first row's, if the
        rows have their own."""
        names = ("prompt_column", "template", "system_prompt", "chat")
        form = {name: getattr(self, name) for name in names}
        if self.rows and (first := self._messages(0))[0]["role"] == "system":
            form["system_prompt"] = first[0]["content"]
        return form | {"tools": self.tools} if self.tools else form

    def _messages(self, row: int) -> list[Message]:
        return policy_text.messages_of(self.rows[row][self.prompt_column])

    def typed(self, prompt: Prompt) -> str | None:
        """Returns the text that becomes `prompt` by `form`; None if other columns, or several
        messages, do."""
        *before, question = self._messages(prompt.id)
        of_form = [{"role": "system", "content": self.form["system_prompt"]}]
        if (before and before != of_form) or self._fields - {self.prompt_column}:
            return None
        return str(question["content"])

    def read(self) -> None:
        """Reads the rows, once. Raises ValueError if the data set cannot be read, is empty, or
        lacks a column."""
        if self.rows:
            return
        rows = list(islice(self._source_rows(), self.limit))
        if not rows:
            raise ConfigError(f"The data set {self.name} is empty.")
        for row_id, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ConfigError(f"Row {row_id} of {self.name} is {row!r:.80}, not a dict.")
        known = list(dict.fromkeys(column for row in rows for column in row))
        for setting, named in (("prompt_column", {self.prompt_column}), ("template", self._fields)):
            if unknown := sorted(named - set(known)):
                raise ConfigError(
                    f"`{setting}` names {', '.join(unknown)}, but {self.name} has the columns "
                    f"{', '.join(known)}."
                )
        self.columns = [column for column in known if column != self.prompt_column]
        self.rows = rows

    def _source_rows(self) -> Iterable[Row]:
        return read_rows(self.source, self.subset, self.split)

    def load(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        environment: Environment | None = None,
    ) -> None:
        """Reads, checks and tokenises every row, unless the arguments are the same as before.
        Raises ValueError as `read` does, or if a prompt cannot be used.

        Args:
            tokenizer: The policy's tokenizer.
            max_prompt_tokens: Longest prompt in tokens, special tokens and chat template included.
            environment: Of the run: its tools are for the chat template, and it may write a part
                of the chat.
        """
        loaded_with = (tokenizer, max_prompt_tokens, environment)
        if self._loaded_with == loaded_with:
            return
        self.read()
        self._environment = environment
        self.tools = [] if environment is None else list(environment.tools)
        self._check_template(tokenizer)
        # disable=None: without a terminal.
        bar = tqdm(self.rows, desc=f"Tokenising {self.name}", unit="prompt", disable=None, delay=2)
        prompts = []
        for row_id, row in enumerate(bar):
            try:
                prompts.append(self._prompt(tokenizer, row_id, row))
            except ConfigError as error:
                raise ConfigError(f"Row {row_id} of {self.name}: {error}") from error
        self._prompts = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
        self._report_too_long(prompts, max_prompt_tokens)
        self._loaded_with = loaded_with
        self._order = (-1, [])
        self.fingerprint = self._digest()

    def _check_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._renders = bool(tokenizer.chat_template) and self.chat is not False
        self._whole_forms = set()
        needs = {
            "`chat=true`": self.chat is True,
            "`system_prompt`": self.system_prompt,
            "data.environment with tools": self.tools,
            "an agent (data.environment)": self._is_agents,
        }
        if not self._renders and any(needs.values()):
            raise ConfigError(
                f"{next(filter(needs.get, needs))} needs a chat template. The prompts of "
                f"{self.name} are plain text: `chat={self.chat}`, and {tokenizer.name_or_path!r} "
                f"{'has one' if tokenizer.chat_template else 'has none'}."
            )
        if self._is_agents and self.system_prompt:
            raise ConfigError(
                f"`system_prompt` of {self.name} reaches nobody: data.environment writes the "
                "chats, with the system message. Leave it out."
            )

    def _prompt(self, tokenizer: PreTrainedTokenizerBase, row_id: int, row: Row) -> Prompt:
        for column in IMAGES:
            if (image := row.get(column)) is not None and image != []:
                raise ConfigError(f"column {column!r}: lrl trains on text alone.")
        messages = policy_text.messages_of(row.get(self.prompt_column))
        question = [message for message in messages if message["role"] == "user"][-1]
        if not self._renders:
            self._refuse_chat(row, messages)
        if self.template is not None:
            content = {self.prompt_column: question["content"]}
            question["content"] = _filled(self.template, row | content)
        chat = None
        if self._renders:
            chat = self._chat_of(tokenizer, row, messages)
            header = self._environment is None or not self._environment.opens
            token_ids = policy_text.encode_chat(tokenizer, chat, header=header)
            if self._is_agents:
                token_ids = token_ids[:1]  # every rendering begins with it
                chat = Chat([], variables=chat.variables)
        else:
            alone = policy_text.encode(tokenizer, question["content"])
            added = tokenizer.encode(question["content"])
            token_ids = policy_text.with_beginning(added, alone)
        return Prompt(
            id=row_id,
            token_ids=token_ids,
            text=question["content"],
            columns={name: value for name, value in row.items() if name != self.prompt_column},
            chat=chat,
        )

    def _refuse_chat(self, row: Row, messages: list[Message]) -> None:
        """Raises a ConfigError if only a chat template would render a part of the row."""
        read = {TOOLS, VARIABLES} - self._fields if self.chat is not False else set()
        lost = [name for name in (TOOLS, VARIABLES) if row.get(name) and name in read]
        if messages != [{"role": "user", "content": row[self.prompt_column]}]:
            lost = [self.prompt_column]
        if lost:
            raise ConfigError(
                f"column {lost[0]!r}: only a chat template renders it, and the prompts are plain "
                f"text (`chat={self.chat}`). Take a tokenizer with a chat template, or set "
                "`chat=false` if only the rewards read it."
            )

    def _chat_of(
        self, tokenizer: PreTrainedTokenizerBase, row: Row, messages: list[Message]
    ) -> Chat:
        if self.system_prompt:
            if messages[0]["role"] == "system":
                raise ConfigError("it has a system message of its own. Leave `system_prompt` out.")
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        # `template` has rendered them.
        tools = [] if TOOLS in self._fields else policy_text.tools_of(row)
        if tools and self.tools:
            raise ConfigError(
                f"column {TOOLS!r}: data.environment has tools of its own, and would not run those "
                "of the row. Leave the column out."
            )
        variables = policy_text.without_nulls(row.get(VARIABLES) or {})
        chat = Chat(messages, self.tools or tools, variables)
        form = (*((one["role"], *one) for one in messages), bool(tools), *chat.variables)
        if form not in self._whole_forms:
            policy_text.check_whole(tokenizer, chat)
            self._whole_forms.add(form)
        return chat

    def _report_too_long(self, prompts: list[Prompt], limit: int) -> None:
        too_long = {one.id: len(one.token_ids) for one in prompts if len(one.token_ids) > limit}
        if not too_long:
            return
        found = (
            f"{len(too_long)} prompts of {self.name} are longer than data.max_prompt_tokens="
            f"{limit}, the longest {max(too_long.values())}: rows {str([*too_long])[1:-1]:.50}."
        )
        if self.too_long == "refuse" or not self._prompts:
            raise ConfigError(f"{found} Raise it, or use `too_long=skip`.")
        log.warning("%s They are skipped.", found)

    def _digest(self) -> str:
        code = zlib.crc32(f"{self.shuffle} {self.seed}".encode())
        for prompt in self:
            code = zlib.crc32(array("q", [prompt.id, *prompt.token_ids]).tobytes(), code)
            if self._is_agents:
                code = zlib.crc32(prompt.text.encode(errors="surrogatepass"), code)
        return f"{code:08x}"

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        """Returns the prompt at `index` of the endless row of shuffled epochs."""
        epoch, position = divmod(index, len(self))
        return self._prompts[self._epoch_order(epoch)[position] if self.shuffle else position]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            # Of another numpy, on which a run may resume, only the raw bits are the same for ever.
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(len(self))
            self._order = (epoch, np.argsort(bits, kind="stable").tolist())
        return self._order[1]


class _Template(string.Formatter):
    """Fills a format string with a row's columns; a column without a value is an error, not the
    word "None"."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, column = super().get_field(field_name, args, kwargs)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise ValueError(f"{field_name} is {'null' if value is None else 'not a number'}")
        return value, column


def _filled(template: str, row: Row) -> str:
    try:
        return _Template().vformat(template, (), row)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"`template={template!r}` cannot be filled: {error}.") from error


def _fields_of(template: str | None) -> set[str]:
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
