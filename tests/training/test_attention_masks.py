"""Masks that lrl makes itself."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

import lrl
from lrl.advantages import GroupMean
from lrl.rollouts.packing import Packer
from lrl.training.trials import Shared
from lrl.types import MicroBatch
from tests.tiny_policies import byte_tokenizer
from tests.training.packed import packed, random_group

WINDOW = 5


@pytest.fixture(scope="module", params=["full", "sliding"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose layers read all, or a window."""
    sizes = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        # A large spread, or all log-probs would be alike and nothing could go wrong.
        "initializer_range": 0.3,
    }
    full = request.param == "full"
    config = LlamaConfig(**sizes) if full else MistralConfig(**sizes, sliding_window=WINDOW)
    torch.manual_seed(1)
    made = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    byte_tokenizer().save_pretrained(made)
    return str(made)


def opened(folder: str) -> lrl.PolicyModule:
    policy = lrl.PolicyModule(folder, objective=lrl.objectives.REINFORCE(), attention="sdpa")
    policy.configure_model()
    assert policy.responses_share == Shared(rows=True, prefixes=True)
    return policy


def one_tree() -> MicroBatch:
    packer = Packer(400, GroupMean(), 1.0, attention_tokens=10_000)
    draw = random.Random(0)
    prompt = [draw.randrange(3, 259) for _ in range(40)]
    (micro,) = packed(packer, [random_group([9, 2, 11, 5], prompt)])
    return micro


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_all_layers_keep_one_mask_for_the_backward_pass(
    folder: str, precision: torch.dtype
) -> None:
    """Of a bool mask, or one of another dtype than the scores, torch makes one in each layer."""
    policy = opened(folder)
    micro = one_tree()
    length = micro.input_ids.shape[1]
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[-2:] == (length, length):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    autocast = torch.autocast("cpu", precision, enabled=precision != torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        loss = policy.compute_loss(micro)
    assert len(kept) == 1
    loss.backward()
