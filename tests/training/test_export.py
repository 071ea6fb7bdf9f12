"""A policy's folder has the trained weights, and everything else as in the first version, whichever
way it is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrl.cli.main import main
from lrl.policy import PolicyModule
from lrl.system import hub
from lrl.training.lora import LoRA
from lrl.training.model import ModelSource, open_tokenizer
from tests.tiny_families import save_tiny
from tests.tiny_policies import byte_tokenizer, tiny_llama

GENERATION = [
    # What transformers loads and refuses to write, and more.
    {"pad_token_id": -1, "length_penalty": 1.5, "early_stopping": True, "top_h": 0.3},
    {"do_sample": True, "temperature": 0.0},
    {"eos_token_id": [0, 2], "do_sample": True, "top_p": 0.9, "vendor": {"a": 1}},
]
KEPT = ("generation_config.json", "config.json", "tokenizer_config.json")
ENDS = '{"eos_token_id": [2, 0], "pad_token_id": -1}'
Export = Callable[[str, Path], None]


def by_the_run(folder: str, out: Path, lora: LoRA | None = None) -> None:
    policy(folder, lora).export(out)


def by_the_command(folder: str, out: Path, lora: LoRA | None = None) -> None:
    state: dict[str, Any] = {
        "policy_folder": folder,
        "global_step": 1,
        "state_dict": policy(folder, lora).state_dict(),
    }
    if lora is not None:
        state |= {"lora": asdict(lora), "dtype": "float32"}
    out.parent.mkdir(exist_ok=True)
    torch.save(state, out.parent / "of-it.ckpt")
    assert main(["export", str(out.parent / "of-it.ckpt"), str(out)]) == 0


def policy(folder: str, lora: LoRA | None = None) -> PolicyModule:
    found = PolicyModule(folder, lora=lora)
    found.configure_model()
    return found


@pytest.fixture(params=[by_the_run, by_the_command])
def export(request: pytest.FixtureRequest) -> Export:
    way: Export = request.param
    return way


@pytest.mark.parametrize("generation", GENERATION, ids=lambda one: "-".join(one))
def test_the_settings_of_generation_are_kept_byte_for_byte(
    generation: dict[str, Any], export: Export, tmp_path: Path
) -> None:
    folder = tiny_llama(tmp_path / "first")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 2} | generation, indent=7)
    )
    export(str(folder), tmp_path / "out")
    assert all(same(name, folder, tmp_path / "out") for name in KEPT[:2])


def same(name: str, folder: Path, out: Path) -> bool:
    return (folder / name).read_bytes() == (out / name).read_bytes()


def test_all_files_that_training_does_not_change_are_kept_byte_for_byte(
    export: Export, tmp_path: Path
) -> None:
    folder = as_of_old(tiny_llama(tmp_path / "first"))
    (folder / "generation_config.json").unlink()
    export(str(folder), tmp_path / "out")
    names = {file.name for file in folder.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    for name in names - {"model.safetensors", "config.json"}:
        assert same(name, folder, tmp_path / "out"), name


def as_of_old(folder: Path) -> Path:
    """Gives a folder what transformers would write anew: the files of an older version, and of a
    processor."""
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": template, "vendor": 1, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=5))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": "<|end|>", "pad_token": "<|pad|>"})
    )
    (folder / "preprocessor_config.json").write_text("{ }")
    (folder / "LICENSE.txt").write_text("Keep this.")
    return folder


def test_a_config_keeps_all_but_what_has_changed(export: Export, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "first")
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "vendor": {"a": 1}}
    config |= {"attention_dropout": 0.1, "repetition_penalty": 1.2, "eos_token_id": [2, 1]}
    config |= {"max_length": 50, "torch_dtype": "bfloat16"}
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    export(str(folder), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"torch_dtype": "float32"}


def test_a_config_has_what_a_script_has_changed(tmp_path: Path) -> None:
    found = policy(str(tiny_llama(tmp_path / "first")))
    found.network.resize_token_embeddings(300)
    found.export(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 300
    again = ModelSource(str(tmp_path / "out")).open()
    assert again.get_input_embeddings().num_embeddings == 300


def test_a_tokenizer_that_a_script_has_changed_is_saved(tmp_path: Path) -> None:
    found = policy(str(as_of_old(tiny_llama(tmp_path / "first"))))
    found.tokenizer.chat_template = "{{ messages[0].content }}"
    found.tokenizer.add_tokens(["<think>"])
    found.export(tmp_path / "out")
    read: PreTrainedTokenizerBase = open_tokenizer(str(tmp_path / "out"))
    assert read.chat_template == "{{ messages[0].content }}" and "<think>" in read.get_vocab()


def test_a_first_version_that_is_gone_does_not_cost_a_run_its_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_llama(tmp_path / "first")
    found = policy(str(folder))
    assert found.tokenizer.eos_token
    folder.rename(tmp_path / "moved")
    found.export(tmp_path / "out")
    assert "is gone" in caplog.text
    assert ModelSource(str(tmp_path / "out")).open() and open_tokenizer(str(tmp_path / "out"))


def test_the_first_version_is_never_written_over(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "first")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(OSError, match="first version"):
        policy(str(folder)).export(folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_the_files_of_a_name_on_the_hub_come_from_its_cache(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.reach.cache_clear()
    place = tmp_path / "cache" / "models--somebody--tiny"
    folder = tiny_llama(place / "snapshots" / "1234")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("1234")
    (folder / "generation_config.json").write_text(ENDS)
    export("somebody/tiny", tmp_path / "out")
    assert all(same(name, folder, tmp_path / "out") for name in KEPT)


@pytest.mark.parametrize("export", [by_the_run, by_the_command])
def test_a_policy_with_adapters_keeps_the_same_and_has_them_apart(
    export: Callable[..., None], tmp_path: Path
) -> None:
    folder = as_of_old(tiny_llama(tmp_path / "first"))
    (folder / "generation_config.json").write_text(ENDS)
    export(str(folder), tmp_path / "out", LoRA(rank=2))
    assert all(same(name, folder, tmp_path / "out") for name in KEPT)
    adapter = {file.name for file in (tmp_path / "out" / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= adapter


@pytest.mark.parametrize("family", ["gemma3", "llama4", "qwen3_5", "gpt2"])
def test_a_part_of_a_larger_model_can_be_opened_again(
    family: str, export: Export, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path / "first")
    byte_tokenizer().save_pretrained(folder)
    export(str(folder), tmp_path / "out")
    first, second = (ModelSource(str(one)).open() for one in (folder, tmp_path / "out"))
    assert second.state_dict().keys() == first.state_dict().keys()
    assert all(
        torch.equal(second.state_dict()[name], weight)
        for name, weight in first.state_dict().items()
    )
