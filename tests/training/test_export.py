"""A policy's folder has the trained weights, and everything else as in the first version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrl.training.lora import LoRA
from lrl.training.model import ModelSource, open_tokenizer
from tests.policies import opened
from tests.tiny_policies import save_tiny, tiny_llama


def as_of_old(folder: Path) -> Path:
    """Gives a folder what transformers would write anew or refuse: the files of an older version, of
    a processor, and settings of generation."""
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": template, "vendor": 1, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=5))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<|end|>", "pad_token": "<|pad|>"})
    )
    generation = {"pad_token_id": -1, "length_penalty": 1.5, "top_h": 0.3, "eos_token_id": [0, 2]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=7))
    (folder / "preprocessor_config.json").write_text("{ }")
    (folder / "LICENSE.txt").write_text("Keep this.")
    return folder


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_all_files_that_training_does_not_change_are_kept_byte_for_byte(
    lora: LoRA | None, tmp_path: Path
) -> None:
    folder, out = as_of_old(tiny_llama(tmp_path / "first")), tmp_path / "out"
    opened(str(folder), lora=lora).export(out)
    names = {file.name for file in folder.iterdir()}
    assert {file.name for file in out.iterdir()} == names | ({"adapter"} if lora else set())
    for name in names - {"model.safetensors"}:
        assert (folder / name).read_bytes() == (out / name).read_bytes(), name


def test_a_config_keeps_all_but_what_has_changed(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "first")
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "vendor": {"a": 1}}
    config |= {"attention_dropout": 0.1, "repetition_penalty": 1.2, "eos_token_id": [2, 1]}
    config |= {"max_length": 50, "torch_dtype": "bfloat16"}
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    opened(str(folder)).export(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"torch_dtype": "float32"}


def test_what_a_script_has_changed_is_saved(tmp_path: Path) -> None:
    found = opened(str(as_of_old(tiny_llama(tmp_path / "first"))))
    found.tokenizer.chat_template = "{{ messages[0].content }}"
    found.tokenizer.add_tokens(["<think>"])
    found.network.resize_token_embeddings(300)
    found.export(tmp_path / "out")
    read: PreTrainedTokenizerBase = open_tokenizer(str(tmp_path / "out"))
    assert read.chat_template == "{{ messages[0].content }}" and "<think>" in read.get_vocab()
    again = ModelSource(str(tmp_path / "out")).open()
    assert again.get_input_embeddings().num_embeddings == 300


def test_a_first_version_that_is_gone_does_not_cost_a_run_its_policy(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "first")
    found = opened(str(folder))
    assert found.tokenizer.eos_token
    folder.rename(tmp_path / "moved")
    found.export(tmp_path / "out")
    assert ModelSource(str(tmp_path / "out")).open() and open_tokenizer(str(tmp_path / "out"))


def test_the_first_version_is_never_written_over(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "first")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(OSError, match="first version"):
        opened(str(folder)).export(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("family", ["gemma3", "llama4", "gpt2"])
def test_a_part_of_a_larger_model_can_be_opened_again(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / "first")
    opened(folder).export(tmp_path / "out")
    first, second = (ModelSource(str(one)).open() for one in (folder, tmp_path / "out"))
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
