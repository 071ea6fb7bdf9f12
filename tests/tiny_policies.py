"""Policies for tests: random weights, two layers, one token a byte, and a chat template."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% "
    "endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


SPECIAL = (PAD, START, END)
IN_NO_TEXT = "ÿþýüûúùø÷öõ"
"""Bytes that UTF-8 never has, as their tokens."""


def byte_tokenizer(
    special: Sequence[str] = SPECIAL, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """259 tokens: the special ones, of which the third ends a response, and every byte, as far as
    there is room."""
    unused = IN_NO_TEXT[: len(special) - len(SPECIAL)]
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(unused))
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        eos_token=special[2],
        chat_template=chat_template,
    )


def with_special_tokens(form: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """`byte_tokenizer` that adds special tokens to a text `$A` as `form` says, such as `<|start|>
    $A <|end|>`."""
    tokenizer = byte_tokenizer().backend_tokenizer
    special = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
    tokenizer.post_processor = TemplateProcessing(single=form, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=START, eos_token=END, chat_template=chat_template
    )


def tiny_llama(folder: Path) -> Path:
    """A Llama with a head of its own; returns the folder."""
    torch.manual_seed(0)
    return _save(LlamaForCausalLM(LlamaConfig(**sizes(), tie_word_embeddings=False)), folder)


def tiny_qwen2(folder: Path) -> Path:
    """A Qwen2 whose head is the embedding, as in the small ones that people train; returns the
    folder."""
    torch.manual_seed(0)
    return _save(Qwen2ForCausalLM(Qwen2Config(**sizes(), tie_word_embeddings=True)), folder)


def with_chats(policy: Path, folder: Path, special: Sequence[str], chat_template: str) -> Path:
    """A copy of one of these with other special tokens, which its template has; returns the
    folder."""
    shutil.copytree(policy, folder)
    byte_tokenizer(special, chat_template).save_pretrained(folder)
    return folder


def tiny_reward_model(folder: Path) -> Path:
    """A sequence classifier with one label and the tokenizer of the others; returns the folder."""
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(LlamaConfig(**sizes(), num_labels=1))
    torch.nn.init.normal_(model.score.weight)
    return _save(model, folder)


def sizes() -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
