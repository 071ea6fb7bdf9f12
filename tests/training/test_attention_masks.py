"""Masks that lrl makes itself, with flex attention above all: what GPUs use and CPUs do not train
with. Its arithmetic is torch's own; in the place of the compiled kernel stands what was traced."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention import flex_attention
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig
from transformers.integrations import flex_attention as flex_of_transformers

import lrl
from lrl.advantages import GroupMean
from lrl.rollouts.packing import Packer
from lrl.training.attention_masks import sequence_ends
from lrl.training.trials import Shared
from lrl.types import MicroBatch
from tests.tiny_policies import byte_tokenizer
from tests.training.packed import packed, random_group

WINDOW = 5


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Lets flex attention train on a CPU; returns what was compiled of it."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    class Torch:
        """torch for the module that compiles flex attention."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def compile(self, function: Any, **settings: Any) -> Any:
            return torch.compile(function, backend=backend, **settings)

    # It refuses a CPU because the kernel for it has no backward pass.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_of_transformers, "torch", Torch())
    monkeypatch.setattr(flex_of_transformers.WrappedFlexAttention, "_instance", None)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield graphs
    torch._dynamo.reset()


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


def opened(folder: str, attention: str) -> lrl.PolicyModule:
    policy = lrl.PolicyModule(folder, objective=lrl.objectives.REINFORCE(), attention=attention)
    policy.configure_model()
    assert policy.responses_share == Shared(rows=True, prefixes=True)
    return policy


def drawn(seed: int, groups: int, prompt: int, budget: int, trees: bool) -> list[MicroBatch]:
    draw = random.Random(seed)
    packer = Packer(budget, GroupMean(), 1.0, attention_tokens=10_000 if trees else 0)
    made = [
        random_group(
            [draw.randrange(1, 12) for _ in range(4)],
            prompt=[draw.randrange(3, 259) for _ in range(prompt)],
            seed=draw.randrange(1000),
            index=index,
        )
        for index in range(groups)
    ]
    return packed(packer, made)


def gradient(policy: lrl.PolicyModule, micros: list[MicroBatch]) -> Tensor:
    policy.zero_grad()
    for micro in micros:
        policy.compute_loss(micro).backward()
    found = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    return torch.cat([one.flatten() for one in found])


def test_a_sequence_ends_where_the_next_one_begins() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    assert sequence_ends(positions).tolist() == [[3, 3, 3, 4, 6, 6], [6, 6, 6, 6, 6, 6]]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_all_layers_keep_one_mask_for_the_backward_pass(
    folder: str, precision: torch.dtype
) -> None:
    """Of a bool mask, or one of another dtype than the scores, torch makes one in each layer."""
    policy = opened(folder, "sdpa")
    (micro,) = drawn(0, groups=1, prompt=40, budget=400, trees=True)
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


@pytest.mark.parametrize("trees", [False, True])
def test_flex_attention_gives_the_gradient_of_sdpa(
    folder: str, trees: bool, compiled: list[Any]
) -> None:
    micros = drawn(0, groups=3, prompt=9, budget=80, trees=trees)
    assert len(micros) > 1
    assert any(micro.readers_end is not None for micro in micros) == trees
    expected = gradient(opened(folder, "sdpa"), micros)
    found = gradient(opened(folder, "flex_attention"), micros)
    assert compiled
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_flex_attention_is_compiled_a_few_times_and_then_never_again(
    folder: str, compiled: list[Any]
) -> None:
    """At torch's limit of eight it would go on without a kernel."""
    policy = opened(folder, "flex_attention")
    assert not compiled, "the trials of a model use the limit up"
    shapes = [
        (seed, groups, prompt, budget, trees)
        for seed, (groups, prompt, budget) in enumerate([(1, 9, 400), (3, 20, 90), (5, 31, 400)])
        for trees in (False, True)
    ]
    for shape in shapes:
        micros = drawn(*shape)
        gradient(policy, micros)
        with torch.no_grad():
            policy.compute_loss(micros[0])
    at_first = len(compiled)
    for seed, groups, prompt, budget, trees in shapes:
        gradient(policy, drawn(seed + 9, groups, prompt + 3, budget + 30, trees))
    assert at_first <= 6
    assert len(compiled) == at_first
