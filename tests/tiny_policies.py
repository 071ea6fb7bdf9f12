"""Policies for tests: random weights, two or three layers of any family of causal language models
that transformers has, one token a byte, and a chat template.

A family's own default config is made small: each size that has a name below gets that size, and of
layers of different kinds one of each kind is kept. Further needs of a family are in `NEEDS`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PAD, START, END = "<|pad|>", "<|start|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% "
    "endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = (PAD, START, END)
IN_NO_TEXT = "ÿþýüûúùø÷öõ"
"""Bytes that UTF-8 never has, as their tokens."""
SERVED: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
"""Sizes of a policy for vLLM, whose kernels for CPUs have no smaller heads, with the tokens of
`byte_tokenizer`."""
FAMILIES: list[str] = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""The `model_type` of each."""

_SIZES = {
    1: (
        "encoder_layers first_k_dense_replace moe_num_shared_experts n_group n_shared_experts "
        "num_dense_layers num_encoder_layers num_kv_shared_layers num_shared_experts topk_group "
        "zero_expert_num"
    ),
    2: (
        "decoder_layers linear_num_key_heads moe_k moe_topk n_groups n_layer n_layers "
        "num_decoder_layers num_experts_per_tok num_experts_per_token num_hidden_layers "
        "num_key_value_heads num_kv_heads num_layers attention_layers"
    ),
    4: (
        "attention_heads decoder_attention_heads encoder_attention_heads index_topk "
        "linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads moe_num_experts "
        "n_head n_heads n_mamba_heads n_routed_experts num_attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads num_experts num_heads "
        "num_local_experts qk_rope_head_dim rotary_dim"
    ),
    6: (
        "attention_chunk_size attention_window_size local_attention sliding_window "
        "sliding_window_size window_size"
    ),
    8: (
        "attention_head_dim chunk_size d_head head_dim hidden_size_per_layer_input index_head_dim "
        "kv_channels kv_lora_rank laurel_rank linear_head_dim linear_key_head_dim "
        "linear_value_head_dim mamba_chunk_size mamba_d_state mamba_dt_rank mamba_headdim "
        "o_lora_rank q_lora_rank qk_nope_head_dim ssm_state_size state_size time_step_rank "
        "v_head_dim"
    ),
    16: (
        "expert_ffn_hidden_size index_n_heads moe_intermediate_size "
        "moe_shared_expert_intermediate_size router_hidden_size shared_expert_intermediate_size"
    ),
    32: "d_model dim_model emb_dim embedding_size hidden_dim hidden_size lru_width n_embd",
    48: (
        "d_inner decoder_ffn_dim dense_intermediate_size dff dim_ff encoder_ffn_dim "
        "feed_forward_size ffn_dim ffn_hidden_size intermediate_size intermediate_size_mlp "
        "shared_intermediate_size"
    ),
    64: (
        "encoder_hash_byte_group_vocab pronunciation_vocab_size shape_vocab_size vocab_size "
        "vocab_size_per_layer_input"
    ),
    256: (
        "max_position_embeddings max_seq_len max_source_positions max_target_positions "
        "model_max_length n_ctx n_positions"
    ),
}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
_LATENT = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "head_dim": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"]}

_LATENT_ATTENTION = (
    *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
    *("glm_moe_dsa", "hy_v4", "kimi_linear", "longcat_flash", "minicpm3", "youtu"),
)

NEEDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_LATENT_ATTENTION, _LATENT),
    "cohere_compass_text": _BOTH | {"rope_parameters": dict.fromkeys(_BOTH["layer_types"], _ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
        "full_attn_idxs": [1],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": _BOTH | {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba2": {
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 16,
    },
}


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


def save_tiny(family: str, folder: Path, scale: float = 1.0, seed: int = 0, **settings: Any) -> str:
    """Writes a tiny model of a family and a tokenizer; raises the error of transformers if it cannot
    be built.

    Args:
        family: A `model_type`.
        folder: The output.
        scale: Factor on the weights of matrices, over what a new model begins with.
        seed: Of the weights.
        **settings: Of the config, over those that make it small.

    Returns:
        The folder.
    """
    config = _small(CONFIG_MAPPING[family](), NEEDS.get(family, {}) | settings)
    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim > 1:
                weight *= scale
    network.save_pretrained(folder)
    config.save_pretrained(folder)  # the whole one: some families save their text config alone
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_llama(folder: Path) -> Path:
    """The policy of the lent server; returns the folder."""
    save_tiny("llama", folder, **SERVED)
    return folder


def with_chats(policy: Path, folder: Path, special: Sequence[str], chat_template: str) -> Path:
    """A copy of one of these with other special tokens, which its template has; returns the
    folder."""
    shutil.copytree(policy, folder)
    byte_tokenizer(special, chat_template).save_pretrained(folder)
    return folder


def tiny_reward_model(folder: Path) -> None:
    """A sequence classifier with one label and the tokenizer of the others."""
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(LlamaConfig(**SERVED, num_labels=1))
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def adapted(network: Any) -> Any:
    """Gives the adapters of a model or policy, if it has any, weights that change what it computes."""
    torch.manual_seed(3)
    for name, weight in network.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.1)
    return network


def response_logprobs(
    network: Any, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """The log-probs of a response behind its prompt, [T], by a plain pass of a model of
    transformers."""
    tokens = torch.tensor([prompt + response])
    logits = network(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(response)), response]


def _small(default: PreTrainedConfig, needs: dict[str, Any]) -> PreTrainedConfig:
    kind = type(default)
    defaults = {name: value for name, value in vars(default).items() if name[0] != "_"}
    given = {
        name: _small(value, NEEDS.get(value.model_type, {}))
        for name, value in defaults.items()
        if isinstance(value, PreTrainedConfig)
    }
    for size, names in _SIZES.items():
        for name in _own(kind, names.split()):
            value = defaults.get(name)
            if type(value) is int and value > 0:
                given[name] = size if name in _own(kind, _DEPTHS) else min(size, value)
    given |= _layers(default) | {name: value for name, value in _TOKENS.items() if name in defaults}
    return kind(**given | needs)


def _layers(default: PreTrainedConfig) -> dict[str, Any]:
    """Returns, of the settings that are lists with an entry for each layer, one layer of each kind,
    at least two."""
    depths = [
        name for name in _own(type(default), _DEPTHS) if type(getattr(default, name, None)) is int
    ]
    lists = {
        name: value
        for name, value in vars(default).items()
        if isinstance(value, list | tuple) and depths and len(value) == getattr(default, depths[0])
    }
    if not lists:
        return {}
    first = {
        repr(kind): number
        for number, kind in reversed(list(enumerate(zip(*lists.values(), strict=True))))
    }
    kept = sorted(first.values())[:4]
    kept = kept * 2 if len(kept) == 1 else kept
    found = {
        name: [_small_entry(value[number]) for number in kept] for name, value in lists.items()
    }
    return found | {name: len(kept) for name in depths}


def _small_entry(entry: Any) -> Any:
    """Makes a layer's width small like any other."""
    return 48 if type(entry) is int and entry > 256 else entry


def _own(kind: type[PreTrainedConfig], names: Any) -> Iterator[str]:
    """Yields the config's own names for them."""
    return (kind.attribute_map.get(name, name) for name in names)
