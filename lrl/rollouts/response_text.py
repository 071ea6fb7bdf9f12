"""The text of a response, as rewards, evaluations and logs see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ResponseDecoder:
    """Turns the tokens of a response into its text, without its end.

    Args:
        tokenizer: The policy's tokenizer.
        ends: What `ends_of_text` returns; these tokens never come into the text.
        skip_special_tokens: Whether to leave out all other special tokens, too.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    skip_special_tokens: bool

    def __call__(self, token_ids: list[int]) -> str:
        """Returns the text of a response."""
        kept = [token for token in token_ids if token not in self.ends]
        return self.tokenizer.decode(kept, skip_special_tokens=self.skip_special_tokens)


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
    decode: Callable[[list[int]], str]


def ends_of_text(tokenizer: PreTrainedTokenizerBase, stop_tokens: frozenset[int]) -> frozenset[int]:
    """Returns the tokens that begin, end or fill up a text, and belong to no response.

    Args:
        tokenizer: The policy's tokenizer.
        stop_tokens: The tokens at which its responses end (`lrl.rollouts.stop_tokens`).
    """
    return (stop_tokens | {tokenizer.bos_token_id, tokenizer.pad_token_id}) - {None}
