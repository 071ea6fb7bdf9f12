"""The text of each token alone, for a reader of tokens (`lrl view`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lrl.rollouts.response_text import decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_CHARACTER = "\ufffd"
LONGEST_CHARACTER = 8
"""Tokens that may be parts of one character; with more of them, their bytes are no character."""


class TokenTexts:
    """The text of each token of a sequence; together they are the text of the sequence.

    Of tokens that are parts of one character, the last one has it, and the others are empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Behind another token: some tokenizers leave out the space at the beginning of a text.
        self._before: list[int] = []
        every = range(len(tokenizer))
        words = ([token] for token in every if self._decode([token]).strip().isalnum())
        self._before = next(words, [])
        self._skipped = len(self._decode([]))

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """Returns a text for each token."""
        found: list[str] = []
        parts: list[int] = []
        for token in token_ids:
            text = self._of_one(token) if not parts else self._text([*parts, token])
            parts.append(token)
            if text.endswith(NO_CHARACTER) and len(parts) < LONGEST_CHARACTER:
                found.append("")
                continue
            found.append(text)
            parts = []
        if parts:
            found[-1] = self._text(parts)
        return found

    def _of_one(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._text([token])
        return self._known[token]

    def _text(self, token_ids: list[int]) -> str:
        return self._decode(token_ids)[self._skipped :]

    def _decode(self, token_ids: list[int]) -> str:
        return decoded(self._tokenizer, [*self._before, *token_ids])
