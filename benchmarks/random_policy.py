"""A policy of a real model's size with random weights, and a load without a download.

Such a policy practically never ends a response: every response has the full length, and every step
the same work. The reward is a hash of the response, so that advantages differ. It is for timing;
there is nothing to learn.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from lrl.types import Group, Prompt, Rollout

EOS = "<eos>"

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {  # for what surrounds a policy: 0.1 million parameters
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
    },
    "5m": {  # for two CPU cores: 4.9 million parameters
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True,
    },
    "130m": {  # of GPT-2's size
        "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2688, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12, "tie_word_embeddings": True,
    },
    "0.5b": {  # of Qwen2.5-0.5B
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "1.5b": {  # of Qwen2.5-1.5B
        "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "8b": {  # of Llama-3.1-8B
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip


def llama(size: str) -> LlamaConfig:
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    return LlamaConfig(**SHAPES[size], **ends, max_position_embeddings=4096, dtype="bfloat16")


def num_parameters(config: LlamaConfig) -> int:
    """Returns the parameters of a Llama of this shape, a tied head counted once; nothing is
    allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())


def made_up_rows(count: int = 1024) -> Iterator[dict[str, str]]:
    rng = random.Random(0)
    for _ in range(count):
        a = rng.randrange(2, 90)
        b = rng.randrange(2, 20)
        c = rng.randrange(2, 12)
        name = rng.choice(["Ada", "Ben", "Chloe", "Dev", "Elif", "Femi"])
        question = (
            f"{name} has {a} apples and buys {b} baskets with {c} apples each. On the way home "
            f"{name} gives a third of the new apples to the neighbours. How many apples are left?"
        )
        yield {"question": question, "answer": f"#### {a + b * c - b * c // 3}"}


def make_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE learned from `texts`, filled up with made-up words: a random policy
    draws any token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(4096, vocab_size),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    written = json.loads(tokenizer.to_str())
    vocab = written["model"]["vocab"]
    vocab |= {f"<{index}>": index for index in range(len(vocab), vocab_size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), eos_token=EOS
    )


def make_policy(config: LlamaConfig, texts: Sequence[str], folder: Path, device: str) -> None:
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(unfinished)
    make_tokenizer(texts, config.vocab_size).save_pretrained(unfinished)
    unfinished.rename(folder)


def made(size: str, folder: Path = Path("runs"), device: str | None = None) -> Path:
    """Returns the policy of a size in `folder`; makes it if it is not there."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    path = folder / f"policy-{size}"
    make_policy(llama(size), [row["question"] for row in made_up_rows()], path, device)
    return path


def tiny() -> Path:
    """As `--model.model benchmarks.random_policy:tiny` of `lrl fit`."""
    return made("tiny")


def of_1_5b() -> Path:
    """Likewise, of Qwen2.5-1.5B's size."""
    return made("1.5b")


def random_tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


def random_group(
    draw: random.Random,
    index: int,
    prompt: Prompt,
    *,
    lengths: Sequence[int],
    vocabulary: int,
    version: int = 0,
) -> Group:
    """Returns a group of responses of these lengths, with the log-probs of a policy that draws any
    token, and with random rewards."""
    rollouts = [
        Rollout(
            token_ids=random_tokens(draw, tokens, vocabulary),
            logprobs=[-math.log(vocabulary)] * tokens,
            versions=[version] * tokens,
            finish_reason="length",
            reward=draw.random(),
        )
        for tokens in lengths
    ]
    return Group(index=index, prompt=prompt, rollouts=rollouts)


def hashed(prompt: str, response: str, **columns: Any) -> float:
    return zlib.crc32(response.encode()) / 2**32
