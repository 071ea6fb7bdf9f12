"""The text of a policy's tokens, and where it ends: one rule for generators, rewards, evaluations,
logs and `lrl chat`.

A response ends where vLLM would end it when it serves the exported policy. A request names these
tokens, and vLLM adds none of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, GenerationConfig

from lrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lrl.environments import Environment

_OPENED = re.compile(r"([<◁]\|?(?!assistant|model|bot)\w[\w:-]*\|?[>▷])\s*\Z", re.IGNORECASE)
_THINKS = re.compile("think|thought|reason", re.IGNORECASE)
_LONGEST_TAG = 16
"""In tokens."""
_NO_CHARACTER = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens that may be parts of one character; with more of them, their bytes are no character."""


@dataclass(frozen=True, kw_only=True)
class PolicyText:
    """A policy's tokenizer, and the text that its tokens are for rewards, environments and logs.

    A tag that stands open at the end of what a response follows, such as the `<think>` of many chat
    templates, is the beginning of its text (`prepend_opened_tag`): the response has only the
    closing one.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    """The tokens at which responses end; they never come into a text."""
    skip_special_tokens: bool = False
    """Whether to leave out all other special tokens, too."""
    prepend_opened_tag: bool = True

    @cached_property
    def _left_out(self) -> frozenset[int]:
        return ends_of_text(self.tokenizer, self.ends)

    def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Returns the text of a response, or of a part of it, that follows the tokens `before`; the
        last few of these are enough."""
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
    """Returns the text of tokens with the spaces that they have: some tokenizers would else make
    `x!= y` of `x != y`."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return str(text)


def stop_tokens(tokenizer: PreTrainedTokenizerBase, folder: str) -> frozenset[int]:
    """Returns the tokens at which the responses of the policy in a folder, or of that hub name,
    end: the tokenizer's end and the ends of generation_config.json, or else of config.json."""
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
    """Returns the tokens at which the turns of an environment end, besides those that end a
    response; raises ConfigError if a text of `environment.stop` is not a single token."""
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
