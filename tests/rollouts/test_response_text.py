"""Rewards see a model's special tokens, but no end of a turn and no padding."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

import lrl
from lrl.rewards import ExactMatch, Format
from tests.tiny_policies import END, PAD, START, tiny_llama

WRITTEN = f"<think>a\nb</think>\\boxed{{72}}<|im_end|>{END}{PAD}{PAD}"


@pytest.fixture
def policy(tmp_path: Path) -> lrl.PolicyModule:
    """A policy that thinks in special tokens; a second token ends a turn, as its
    generation_config.json says."""
    folder = str(tiny_llama(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [START, "<think>", "</think>", "<|im_end|>"]}
    )
    tokenizer.save_pretrained(folder)
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    GenerationConfig(eos_token_id=[tokenizer.eos_token_id, turn_end]).save_pretrained(folder)
    return lrl.PolicyModule(folder)


def text_of(policy: lrl.PolicyModule, **settings: bool) -> str:
    data = lrl.RolloutDataModule([{"prompt": "1"}], ExactMatch(), **settings)
    data.trainer = type("OfThisPolicy", (), {"lightning_module": policy})()  # type: ignore[assignment]
    return data.decode(policy.tokenizer(WRITTEN, add_special_tokens=False).input_ids)


def test_a_format_of_special_tokens_is_seen_by_a_reward_and_the_end_of_a_turn_is_not(
    policy: lrl.PolicyModule,
) -> None:
    assert text_of(policy) == "<think>a\nb</think>\\boxed{72}"
    assert Format(r"<think>.*</think>.*\\boxed\{.*")("", text_of(policy)) == 1.0


def test_special_tokens_may_be_left_out(policy: lrl.PolicyModule) -> None:
    assert text_of(policy, skip_special_tokens=True) == "a\nb\\boxed{72}"


def test_a_policy_without_a_generation_config_has_the_ends_of_its_config_and_tokenizer(
    policy: lrl.PolicyModule,
) -> None:
    (Path(policy.policy_folder) / "generation_config.json").unlink()
    ids = policy.tokenizer.convert_tokens_to_ids([END, PAD])
    assert policy.ends_of_text == frozenset(ids)
