"""Rewards see a model's special tokens, but no end of a turn and no padding."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import lrl
from lrl.rewards import ExactMatch, Format
from lrl.rollouts.response_text import ResponseDecoder
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


def text_of(
    policy: lrl.PolicyModule, written: str = WRITTEN, before: str = "", **settings: bool
) -> str:
    data = lrl.RolloutDataModule([{"prompt": "1"}], ExactMatch(), **settings)
    data.trainer = type("OfThisPolicy", (), {"lightning_module": policy})()  # type: ignore[assignment]
    tokens, opened = policy.tokenizer([written, before], add_special_tokens=False).input_ids
    return data.decode(tokens, opened)


def test_a_format_of_special_tokens_is_seen_by_a_reward_and_the_end_of_a_turn_is_not(
    policy: lrl.PolicyModule,
) -> None:
    assert text_of(policy) == "<think>a\nb</think>\\boxed{72}"
    assert Format(r"<think>.*</think>.*\\boxed\{.*")("", text_of(policy)) == 1.0


@pytest.mark.parametrize(
    "opened", ["<think>", "<think>\n", "<thinking>\n", "<seed:think>", "<scratchpad>\n\n"]
)
def test_the_tag_that_the_prompt_opens_belongs_to_the_text(
    policy: lrl.PolicyModule, opened: str
) -> None:
    """The reward of the example was 0 for every response, where the template opens the tag."""
    written = f"a</{opened.strip()[1:]}\\boxed{{72}}<|im_end|>"
    text = text_of(policy, written, f"1{END}{START}assistant\n{opened}")
    assert text == opened + written.removesuffix("<|im_end|>")
    pattern = rf"{opened.strip()}.*</{opened.strip()[1:]}.*\\boxed\{{.*"
    assert Format(pattern)("", text) == 1.0
    assert text_of(policy, "a", f"1{opened}", prepend_opened_tag=False) == "a"


@pytest.mark.parametrize(
    "before",
    [
        *(
            "",
            START,
            f"a{END}",
            "<think>\n\n</think>\n\n",
            "1 < 2 > 1",
            "<think>\nIt",
            "<assistant>\n",
        ),
        *("<|assistant|>\n", "</b>", "x <y and z>"),
    ],
)
def test_what_stands_before_a_response_and_is_no_open_tag_does_not_belong_to_the_text(
    policy: lrl.PolicyModule, before: str
) -> None:
    assert text_of(policy, "a", before) == "a"


def test_a_special_token_that_is_left_out_of_a_text_is_not_before_it(
    policy: lrl.PolicyModule,
) -> None:
    assert text_of(policy, "a", "1<think>", skip_special_tokens=True) == "a"


@pytest.mark.parametrize("text", ["x != y", "a , b . c ?", "do n't", " a ' m"])
def test_a_text_has_the_spaces_that_the_policy_wrote(text: str) -> None:
    """`x != y` became `x!= y` with tokenizers that say so in their files."""
    words = {word: number for number, word in enumerate(["[UNK]", *dict.fromkeys(text.split())])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        clean_up_tokenization_spaces=True,
    )
    tokens = tokenizer.convert_tokens_to_ids(text.split())
    assert tokenizer.decode(tokens) != " ".join(text.split())
    decode = ResponseDecoder(tokenizer=tokenizer, ends=frozenset(), skip_special_tokens=False)
    assert decode(tokens) == " ".join(text.split())


def test_special_tokens_may_be_left_out(policy: lrl.PolicyModule) -> None:
    assert text_of(policy, skip_special_tokens=True) == "a\nb\\boxed{72}"


def test_a_policy_without_a_generation_config_has_the_ends_of_its_config_and_tokenizer(
    policy: lrl.PolicyModule,
) -> None:
    (Path(policy.policy_folder) / "generation_config.json").unlink()
    ids = policy.tokenizer.convert_tokens_to_ids([END, PAD])
    assert policy.ends_of_text == frozenset(ids)
