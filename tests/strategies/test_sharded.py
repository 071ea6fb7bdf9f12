"""Sharded policies (FSDP2) on two ranks: their gradient, log-probs and weights are those of one
process.

Covers lrl/strategies/fsdp.py, lrl/training/sharding.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from lrl.errors import ConfigError
from lrl.training.beside.reference import Reference
from lrl.training.model import ModelSource
from lrl.training.pieces import whole_tensors
from lrl.training.sharding import tensor_parallel_plan
from tests.policies import SIZES, gradient, opened, pack, save_model
from tests.strategies import sharded_step
from tests.strategies.forked_ranks import run_ranks
from tests.strategies.gradient_of_ranks import BUDGET, GROUPS
from tests.strategies.sharded_step import (
    ADAPTED,
    LONE,
    LORA,
    MIXTURE,
    TEXT,
    UNDIVIDED,
    advantages_of,
    critic_of,
    fill_new_weights,
    prepare,
    reference_logprobs,
    target_of,
)

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
EXPERTS |= {"num_experts_per_tok": 2}


def configs() -> dict[str, PreTrainedConfig]:
    """Architectures with what may be divided wrongly: tied heads, biases, norms of heads, caps,
    experts, packed projections, scaled positions.

    One more computes in bfloat16.
    """
    wide = SIZES | {"head_dim": 8}
    return {
        "llama3_rope": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
        "llama_tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "qwen2": transformers.Qwen2Config(**SIZES),
        "qwen3": transformers.Qwen3Config(**wide),
        "gemma2": transformers.Gemma2Config(**wide),
        "qwen3_moe": transformers.Qwen3MoeConfig(**wide, **EXPERTS),
        "phi3": transformers.Phi3Config(**SIZES, pad_token_id=0),
        "llama_bf16": transformers.LlamaConfig(**SIZES),
        ADAPTED: transformers.LlamaConfig(**SIZES),
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in configs().items():
        save_model(folder / name, config)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["shards", "shards_and_tensor_parallelism"])
def results(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder, ranks = tmp_path_factory.mktemp("results"), 2 * request.param
    run_ranks(sharded_step.main, ranks, folder, models, folder, request.param)
    for name in configs().keys() - set(UNDIVIDED) if request.param == 2 else ():
        for rank in range(2):  # both ranks of a pair have done the same
            found, other = (
                torch.load(folder / f"{name}-{2 * rank + place}.pt") for place in range(2)
            )
            assert found["passes"] == other["passes"] and found["share"] < 0.5
            (folder / f"{name}-{2 * rank}.pt").rename(folder / f"{name}-{rank}.pt")
    return folder


@pytest.mark.parametrize("name", configs())
def test_a_sharded_policy_equals_the_policy_of_one_process(
    name: str, models: Path, results: Path
) -> None:
    if not (results / f"{name}-0.pt").exists():
        assert name in UNDIVIDED
        if name == MIXTURE:
            with pytest.raises(ConfigError, match="tensor_parallel_size is 2, .*moe_tp_experts"):
                tensor_parallel_plan(opened(str(models / name)).network, 2)
        return
    first, second = (torch.load(results / f"{name}-{rank}.pt") for rank in range(2))
    policy: Any = opened(
        str(models / name),
        lora=LORA if name == ADAPTED else None,
        reference=Reference(),
        critic=critic_of(models / name, 1) if first["critic"] else None,
    )
    policy.setup("fit")
    fill_new_weights(policy)
    trained = [parameter for parameter, weight in policy.named_parameters() if weight.requires_grad]
    in_bfloat16 = name.endswith("bf16")
    assert 0.2 < first["share"] < 0.6 and first["passes"] == second["passes"] > 2
    assert first["blanks"] + second["blanks"] == 1
    whole = torch.cat([first["gradient"][parameter].flatten() for parameter in trained])
    off = 0.05 if in_bfloat16 else 1e-5
    assert first["logprobs"] == pytest.approx(policy.prompt_logprobs(TEXT), abs=off)
    assert (first["logprobs"] != policy.prompt_logprobs(TEXT)) or not in_bfloat16
    assert first["rounded"] != first["logprobs"] == pytest.approx(first["rounded"], abs=1.0)
    held = policy.prompt_logprobs(TEXT, None, "bfloat16")
    assert first["held"] == pytest.approx(held, abs=off)
    assert (first["held"] == first["logprobs"]) == in_bfloat16, "rounded once is rounded"
    assert first["afterwards"] == first["logprobs"], "the weights are whole again"
    for found, expected in zip(first["reference"], reference_logprobs(policy), strict=True):
        assert found == pytest.approx(expected, abs=off)
    weights = dict(policy.whole_weights())
    assert first["weights"].keys() == weights.keys()
    assert all(torch.equal(first["weights"][one], weights[one]) for one in weights)
    exported = ModelSource(str(results / f"{name}-exported")).open()
    assert all(
        torch.equal(exported.state_dict()[one], weight)
        for one, weight in whole_tensors(policy.network)
    )
    groups = copy.deepcopy([*GROUPS, LONE])
    for group in groups:
        prepare(policy, group)
    alone = gradient(policy, pack(groups, BUDGET, advantages=advantages_of(policy)))
    assert alone.abs().max() > 0.001
    torch.testing.assert_close(first["target"], target_of(policy))
    if in_bfloat16:
        assert whole.dtype == torch.float32 and (whole - alone).norm() < 0.05 * alone.norm()
    else:
        torch.testing.assert_close(whole, alone, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "size", "text"),
    [
        (
            transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4),
            2,
            "no plan to divide",
        ),
        (transformers.LlamaConfig(**SIZES), 4, "does not divide the model's num_key_value_heads 2"),
    ],
)
def test_a_model_that_tensor_parallelism_cannot_divide_is_refused(
    config: PreTrainedConfig, size: int, text: str, tmp_path: Path
) -> None:
    network = opened(save_model(tmp_path / "model", config)).network
    with pytest.raises(ConfigError, match=f"strategy.tensor_parallel_size is {size}, .*{text}"):
        tensor_parallel_plan(network, size)
