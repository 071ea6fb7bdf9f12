"""Greedy accuracy of a saved policy: one piece of code for the policies of both sides, apart from
their clocks."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.against_trl.settings import ANSWER_TOKENS, finish_reason
from lrl.quickstart.task import correct, held_out


@torch.no_grad()
def accuracy(folder: Path) -> float:
    """Returns the share of the held-out problems that the policy answers rightly with its likeliest
    tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = held_out()
    # All prompts are equally long.
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    greedy = GenerationConfig(
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    found = model.generate(**batch, generation_config=greedy)[:, batch.input_ids.shape[1] :]
    rewards = []
    for row, tokens in zip(rows, found.tolist(), strict=True):
        ids = until_end(tokens, tokenizer.eos_token_id)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        reason = finish_reason(ids, tokenizer.eos_token_id)
        rewards.append(correct(row["prompt"], text, answer=row["answer"], finish_reason=reason))
    return sum(rewards) / len(rewards)


def until_end(token_ids: list[int], eos: int) -> list[int]:
    """Returns a response without the padding after its end token."""
    return token_ids[: token_ids.index(eos) + 1] if eos in token_ids else token_ids
