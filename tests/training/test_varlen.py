"""lrl's attention on GPUs computes what each sequence gets alone, and a model has it only where that
is so. A kernel for CPUs stands for the real one (`tests.flash_kernel`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lrl
from lrl.errors import ConfigError
from lrl.system.ranks import Ranks
from lrl.training import varlen
from lrl.training.collate import fill_rows, text_sequence
from lrl.training.model import ModelSource, open_on_ranks
from lrl.training.prefix_tree import PrefixTree
from lrl.training.trials import Shared, shared_by_responses
from lrl.types import MicroBatch, SequenceBounds
from tests.flash_kernel import flash_kernel
from tests.policies import flat_gradient, make_group, opened, pack
from tests.tiny_policies import save_tiny

HEADS, KV_HEADS, SIZE, WINDOW = 4, 2, 8, 5
FAMILIES = ("llama", "mistral", "qwen3", "gemma3_text", "gpt_oss", "olmo3")
"""Full, windows, norms of heads, both kinds of layers, sinks, and norms behind layers."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Lets the CPU compute as a GPU does, but exactly; returns the kernel's calls."""
    monkeypatch.setattr(varlen, "plain", varlen.Flash.apply)
    with flash_kernel(exact=True) as calls:
        yield calls


def tree(group: int, shared: int, *branches: int) -> PrefixTree:
    prompt = list(range(shared + 1))
    samples = [text_sequence([prompt[-1], *range(length)], group) for length in branches]
    for sample in samples:
        sample.prompt = prompt
    return PrefixTree(samples, shared)


def one(group: int, length: int) -> PrefixTree:
    return PrefixTree([text_sequence(list(range(length)), group)])


LAYOUTS = {
    "rows": [[one(0, 7), one(1, 3)], [one(2, 12)], [one(3, 1), one(4, 1)]],
    "one row": [[one(0, 7), one(1, 4)]],
    "trees": [[tree(0, 6, 3, 9, 1), one(1, 4), tree(2, 1, 1, 2)], [tree(3, 11, 2, 2)]],
}


def chains(rows: list[list[PrefixTree]], length: int) -> Iterator[tuple[list[int], int]]:
    """Yields the places of each sequence, and how many of the first have their output elsewhere."""
    for row, trees in enumerate(rows):
        start = row * length
        for tree in trees:
            shared = list(range(start, start + tree.shared))
            if shared:
                yield shared, 0
            start += tree.shared
            for sample in tree.samples:
                own = list(range(start, start + len(sample) - tree.shared))
                yield shared + own, tree.shared
                start += len(own)
        if padding := list(range(start, (row + 1) * length)):
            yield padding, 0


def alone(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """The attention of one sequence, [T, heads, size]."""
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SIZE**-0.5
    place = torch.arange(len(query))
    far = place[:, None] - place[None]
    hidden = (far < 0) if window is None else (far < 0) | (far >= window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize(
    ("layout", "window", "sunk"), list(product(LAYOUTS, (None, WINDOW), (False, True)))
)
def test_each_sequence_gets_what_it_gets_alone(
    layout: str, window: int | None, sunk: bool, calls: list[Any]
) -> None:
    rows = LAYOUTS[layout]
    micro = fill_rows(rows, temperature=1.0)
    shape = micro.input_ids.shape
    torch.manual_seed(0)
    inputs = [
        torch.randn(shape[0], heads, shape[1], SIZE, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True) if sunk else None
    assert micro.bounds is not None
    flat = [each.transpose(1, 2).flatten(0, 1) for each in inputs]
    found = varlen.Flash.apply(*flat, sinks, micro.bounds, SIZE**-0.5, window)
    expected = torch.zeros(shape.numel(), HEADS, SIZE, dtype=torch.float64)
    for places, elsewhere in chains(rows, shape[1]):
        result = alone(*(each[places] for each in flat), window, sinks)
        index = torch.tensor(places[elsewhere:])
        expected = expected.index_copy(0, index, result[elsewhere:])
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-12)
    upstream = torch.randn_like(expected)
    wanted = [*inputs, sinks] if sinks is not None else inputs
    gradients = torch.autograd.grad((found * upstream).sum(), wanted)
    true = torch.autograd.grad((expected * upstream).sum(), wanted)
    torch.testing.assert_close(gradients, true, atol=1e-13, rtol=1e-12)
    assert len(calls) == 1, "one kernel computes prompts and branches"


def results(policy: lrl.PolicyModule, micros: list[MicroBatch]) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of all weights."""
    policy.zero_grad()
    for micro in micros:
        policy.compute_loss(micro).backward()
    logprobs = [micro.of_labels(policy(micro).detach()) for micro in micros]
    return torch.cat(logprobs), flat_gradient(policy)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_computes_as_with_masks(
    family: str, trees: bool, tmp_path: Path, calls: list[Any]
) -> None:
    folder = save_tiny(family, tmp_path, 4.0)
    settings = {"attention": "eager", "gradient_checkpointing": trees}
    policy = opened(folder, objective=lrl.objectives.REINFORCE(), **settings)
    groups = [make_group(index, prompt=range(3, 12)) for index in range(3)]
    micros = pack(groups, 80, attention_tokens=10_000 if trees else 0)
    assert any(micro.readers_end is not None for micro in micros) == trees
    logprobs, gradient = results(policy, micros)
    policy.network.set_attn_implementation(varlen.VARLEN)
    found, found_gradient = results(policy, micros)
    assert calls
    torch.testing.assert_close(found, logprobs, atol=1e-4, rtol=0)
    assert (found_gradient - gradient).norm() / gradient.norm() < 1e-4


def source(folder: str, **settings: Any) -> ModelSource:
    return ModelSource(folder, takes_flash=True, **settings)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_trains_on_a_gpu_in_16_bits_has_it(
    family: str, in_parts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sharded one is tried on the CPU, with another attention."""
    folder = save_tiny(family, tmp_path, 4.0)
    named = varlen.VARLEN if family == "llama" else None
    with caplog.at_level(logging.INFO, "lrl"):
        network, whole = open_on_ranks(source(folder, attention=named), "cpu", Ranks(), in_parts)
    assert network.config._attn_implementation == varlen.VARLEN
    assert caplog.messages == [f"model={folder!r}: attention varlen"]
    assert whole is not None and (whole is network) != in_parts
    share = shared_by_responses(whole)
    assert share.under(network) == share and share.rows and share.prefixes


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma2", "neither masks nor a cap on scores"),
        ("deepseek_v3", "not 12 and 8"),
        ("deepseek_v32", "transformers has no flash attention for it"),
        ("falcon", "transformers has no flash attention for it"),
        ("qwen3_next", "responses then differ by"),
        ("stablelm", "missing 1 required keyword-only argument: 'bounds'"),
    ],
)
def test_a_model_that_cannot_have_it_keeps_transformers_own_or_is_refused(
    family: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny(family, tmp_path, 4.0)
    with caplog.at_level(logging.INFO, "lrl"):
        network, _ = open_on_ranks(source(folder), "cpu", Ranks(), in_parts=False)
    assert network.config._attn_implementation in ("sdpa", "eager")
    assert why in caplog.text
    with pytest.raises(ConfigError, match=why):
        open_on_ranks(source(folder, attention=varlen.VARLEN), "cpu", Ranks(), in_parts=False)


@pytest.mark.parametrize("fault", ["window", "scaling", "bounds"])
def test_a_fault_of_the_kernel_is_found_before_it_trains(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny("mistral", tmp_path, 4.0)
    right = varlen.plain

    def wrong(query: Any, key: Any, value: Any, *more: Any) -> Tensor:
        sinks, bounds, scaling, window = more
        if fault == "window":
            window = None
        elif fault == "scaling":
            scaling *= 1.1
        else:
            ends = torch.tensor([0, len(query)], dtype=torch.int32)
            bounds = SequenceBounds(ends, ends, len(query), len(query))
        return right(query, key, value, sinks, bounds, scaling, window)

    monkeypatch.setattr(varlen, "plain", wrong)
    with caplog.at_level(logging.INFO, "lrl"):
        network, _ = open_on_ranks(source(folder), "cpu", Ranks(), in_parts=False)
    assert network.config._attn_implementation == "sdpa"
    assert "because responses then differ by" in caplog.text


@pytest.mark.parametrize("attention", [varlen.VARLEN, "flash_attention_2"])
def test_a_flash_attention_is_refused_where_it_cannot_compute(attention: str, folder: str) -> None:
    policy = lrl.PolicyModule(folder, attention=attention, dtype="bfloat16")
    with pytest.raises(ConfigError, match="16 bits on a GPU"):
        policy.configure_model()


def test_a_policy_in_parts_with_flash_attention_shares_no_prompts(folder: str) -> None:
    """The whole one on the CPU was tried with masks, which flash attention does not take."""
    network = ModelSource(folder).open()
    network.config._attn_implementation = "flash_attention_2"
    tried = Shared(packed=True, prefixes=True)
    assert tried.under(network) == Shared(packed=True)
    assert tried._replace(packed=False).under(network) == Shared()


def test_gradients_of_a_shared_prompt_are_summed_in_float32() -> None:
    """In 16 bits the sum over many branches would lose most of what each adds."""
    micro = fill_rows([[tree(0, 2, *[1] * 200)]], temperature=1.0)
    torch.manual_seed(0)
    value = torch.ones(micro.input_ids.numel(), 1, 8, dtype=torch.bfloat16, requires_grad=True)
    zeros = torch.zeros_like(value)
    with flash_kernel():
        found: Tensor = varlen.Flash.apply(zeros, zeros, value, None, micro.bounds, 1.0, None)
        (gradient,) = torch.autograd.grad(found.sum(), value)
    exact = varlen.plain(
        zeros.double(), zeros.double(), value.double(), None, micro.bounds, 1.0, None
    )
    (wanted,) = torch.autograd.grad(exact.sum(), value)
    torch.testing.assert_close(gradient, wanted, rtol=2**-7, atol=0)
