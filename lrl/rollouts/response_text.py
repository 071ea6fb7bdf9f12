"""The text of a response, as rewards, evaluations and logs see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Decode = Callable[[Sequence[int], Sequence[int]], str]
"""Returns the text of tokens of the policy; the second tokens stand before them."""
_OPENED = re.compile(r"([<◁]\|?(?!assistant|model|bot)\w[\w:-]*\|?[>▷])\s*\Z", re.IGNORECASE)
_THINKS = re.compile("think|thought|reason", re.IGNORECASE)
_LONGEST_TAG = 16
"""In tokens."""


@dataclass(frozen=True, kw_only=True)
class ResponseDecoder:
    """Turns the tokens of a response into its text, without its end.

    A tag that stands open at the end of what it follows, such as the `<think>` of many chat
    templates, is the beginning of its text: the response has only the closing one.

    Args:
        tokenizer: The policy's tokenizer.
        ends: What `ends_of_text` returns; these tokens never come into the text.
        skip_special_tokens: Whether to leave out all other special tokens, too.
        prepend_opened_tag: Whether the text begins with the tag that stands open before it.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    skip_special_tokens: bool
    prepend_opened_tag: bool = True

    def __call__(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Returns the text of a response, or of a part of it.

        Args:
            token_ids: Its tokens.
            before: The tokens that it follows; the last few are enough.
        """
        kept = [token for token in token_ids if token not in self.ends]
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


def decoded(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], skip_special_tokens: bool = False
) -> str:
    """Returns the text of tokens with the spaces that they have: some tokenizers would else make
    `x!= y` of `x != y`."""
    text = tokenizer.decode(
        list(token_ids),
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )
    return str(text)


@dataclass(frozen=True, kw_only=True)
class PolicyText:
    """A policy's tokenizer, stop tokens and decoder.

    Args:
        tokenizer: Its tokenizer.
        ends: The tokens at which its responses end.
        decode: Returns the text of a turn.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    decode: Decode


def ends_of_text(tokenizer: PreTrainedTokenizerBase, stop_tokens: frozenset[int]) -> frozenset[int]:
    """Returns the tokens that begin, end or fill up a text, and belong to no response.

    Args:
        tokenizer: The policy's tokenizer.
        stop_tokens: The tokens at which its responses end (`lrl.rollouts.stop_tokens`).
    """
    return (stop_tokens | {tokenizer.bos_token_id, tokenizer.pad_token_id}) - {None}
