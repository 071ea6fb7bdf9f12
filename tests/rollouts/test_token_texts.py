"""The texts of single tokens, together and where one is no character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lrl.rollouts.token_texts import TokenTexts
from tests.tiny_policies import byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.binary(max_size=40))
def test_the_texts_of_tokens_together_are_the_text(text: bytes) -> None:
    """One token is one byte here, and many of these are no character, or a part of one."""
    letters = TOKENIZER.backend_tokenizer.get_vocab()
    alphabet = TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    token_ids = [letters[alphabet(chr(byte))[0][0][0]] for byte in text if byte < 128]
    token_ids += TOKENIZER.encode(text.decode(errors="ignore"))
    found = TokenTexts(TOKENIZER)(token_ids)
    assert len(found) == len(token_ids)
    assert "".join(found) == TOKENIZER.decode(token_ids, clean_up_tokenization_spaces=False)


def test_bytes_that_are_no_character_keep_their_place() -> None:
    broken = TOKENIZER.encode("日")[:2]
    found = TokenTexts(TOKENIZER)([*broken, *TOKENIZER.encode("ab")])
    assert len(found) == 4 and "".join(found).endswith("ab") and "\ufffd" in "".join(found)
    assert TokenTexts(TOKENIZER)(broken)[-1] != ""
