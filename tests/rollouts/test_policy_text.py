"""The text of a response, of its single tokens, and the tokens at which it ends: one rule for
generators, rewards, `lrl chat` and the checks, and it is vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import lrl
from lrl.callbacks import Evaluation
from lrl.cli import chat
from lrl.rewards import ExactMatch, Format
from lrl.rollouts.policy_text import PolicyText, TokenTexts
from lrl.training.model import open_tokenizer
from tests.tiny_policies import END, PAD, START, byte_tokenizer, tiny_llama

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
    data.run = SimpleNamespace(policy=policy)  # type: ignore[assignment]
    tokens, opened = policy.tokenizer([written, before], add_special_tokens=False).input_ids
    return data.policy_text.decode(tokens, opened)


def test_a_format_of_special_tokens_is_seen_by_a_reward_and_the_end_of_a_turn_is_not(
    policy: lrl.PolicyModule,
) -> None:
    assert text_of(policy) == "<think>a\nb</think>\\boxed{72}"
    assert Format(r"<think>.*</think>.*\\boxed\{.*")("", text_of(policy)) == 1.0
    assert text_of(policy, skip_special_tokens=True) == "a\nb\\boxed{72}"
    assert text_of(policy, "a", "1<think>", skip_special_tokens=True) == "a"


@pytest.mark.parametrize("opened", ["<think>", "<seed:think>", "<scratchpad>\n\n"])
def test_the_tag_that_the_prompt_opens_belongs_to_the_text(
    policy: lrl.PolicyModule, opened: str
) -> None:
    written = f"a</{opened.strip()[1:]}\\boxed{{72}}<|im_end|>"
    text = text_of(policy, written, f"1{END}{START}assistant\n{opened}")
    assert text == opened + written.removesuffix("<|im_end|>")
    pattern = rf"{opened.strip()}.*</{opened.strip()[1:]}.*\\boxed\{{.*"
    assert Format(pattern)("", text) == 1.0
    assert text_of(policy, "a", f"1{opened}", prepend_opened_tag=False) == "a"


@pytest.mark.parametrize(
    "before",
    [START, f"a{END}", "<think>\n\n</think>\n\n", "1 < 2 > 1", "<think>\nIt", "<assistant>\n"],
)
def test_what_stands_before_a_response_and_is_no_open_tag_does_not_belong_to_the_text(
    policy: lrl.PolicyModule, before: str
) -> None:
    assert text_of(policy, "a", before) == "a"


@pytest.mark.parametrize("text", ["x != y", "a , b . c ?", "do n't", " a ' m"])
def test_a_text_has_the_spaces_that_the_policy_wrote(text: str) -> None:
    words = {word: number for number, word in enumerate(["[UNK]", *dict.fromkeys(text.split())])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        clean_up_tokenization_spaces=True,
    )
    tokens = tokenizer.convert_tokens_to_ids(text.split())
    assert tokenizer.decode(tokens) != " ".join(text.split())
    text_of_policy = PolicyText(tokenizer=tokenizer, ends=frozenset())
    assert text_of_policy.decode(tokens) == " ".join(text.split())


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


END_ID = byte_tokenizer().eos_token_id
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool, set[int]]] = {
    "all agree": ({"eos_token_id": END_ID}, {"eos_token_id": END_ID}, True, {END_ID}),
    "several ends": ({"eos_token_id": END_ID}, {"eos_token_id": [7, 9]}, True, {END_ID, 7, 9}),
    "none of generation": ({"eos_token_id": [END_ID, 11]}, None, True, {END_ID, 11}),
    "generation without ends": ({"eos_token_id": 11}, {"temperature": 0.5}, True, {END_ID}),
    "generation over the config": ({"eos_token_id": 11}, {"eos_token_id": 7}, True, {END_ID, 7}),
    "no end of the tokenizer": ({"eos_token_id": 11}, {"eos_token_id": [7]}, False, {7}),
    "no end of the tokenizer nor of generation": ({"eos_token_id": 11}, None, False, {11}),
    "no end at all": ({"eos_token_id": None}, None, False, set()),
}
"""config.json, generation_config.json, whether the tokenizer has an end, and the stop tokens."""


def folder_of(kind: str, tmp_path: Path) -> Path:
    config, generation, tokenizer_ends, _ = FOLDERS[kind]
    folder = tiny_llama(tmp_path / "policy")
    of_model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(of_model | config))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if not tokenizer_ends:
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = None
        tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_part_of_a_run_knows_the_ends_by_which_vllm_serves_the_folder(
    kind: str, tmp_path: Path
) -> None:
    folder, wanted = folder_of(kind, tmp_path), FOLDERS[kind][-1]
    policy, data = (
        lrl.PolicyModule(str(folder)),
        lrl.RolloutDataModule([{"prompt": "1"}], ExactMatch()),
    )
    data.run = SimpleNamespace(policy=policy, data=data, start_rewards=print)  # type: ignore[assignment]
    assert policy.stop_tokens == wanted
    evaluation = Evaluation([{"prompt": "1"}], rewards=ExactMatch())
    evaluation.prompts.load(policy.tokenizer, 99)
    trainer: Any = SimpleNamespace(datamodule=data)
    evaluation.setup(trainer, policy, "fit")
    for sampling in (data.requests, evaluation.sampling):
        asked = sampling.as_vllm(n=1, written=0)
        assert set(asked["stop_token_ids"]) == wanted and asked["ignore_eos"]
    ends = chat.open_policy(folder, 0.0, 4)[0].generation_config.eos_token_id
    assert set(ends or ()) == wanted

    config = pytest.importorskip("vllm.transformers_utils.config")
    from vllm.sampling_params import SamplingParams

    found = config.try_get_generation_config(str(folder), trust_remote_code=False)
    tokenizer_end = open_tokenizer(str(folder)).eos_token_id
    for one in (SamplingParams(), SamplingParams(stop_token_ids=sorted(wanted), ignore_eos=True)):
        one.update_from_generation_config(found.to_diff_dict(), tokenizer_end)
        assert {*one.stop_token_ids, one.eos_token_id} - {None} == wanted
