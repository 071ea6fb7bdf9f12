"""Log-probs in chunks: values and gradients against the plain formula in float64, and
allocations."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lrl.training.logprobs import IDENTITY, LogitTransform, _compiled, token_logprobs

VOCABULARY, WIDTH = 50, 16


def inputs(tokens: int, bias: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Draws hidden [tokens, WIDTH], weight [VOCABULARY, WIDTH], labels and the bias with `tokens`
    as the seed."""
    draw = torch.Generator().manual_seed(tokens)
    hidden = (0.3 * torch.randn(tokens, WIDTH, generator=draw)).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).requires_grad_()
    labels = torch.randint(VOCABULARY, (tokens,), generator=draw)
    offset = torch.randn(VOCABULARY, generator=draw).requires_grad_() if bias else None
    return hidden, weight, labels, offset


def naive(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    transform: LogitTransform = IDENTITY,
) -> Tensor:
    """Computes the formula in float64."""
    offset = None if bias is None else bias.double()
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), offset)
    logits = logits * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    return (logits / temperature).log_softmax(-1)[torch.arange(len(labels)), labels]


def gradients(logprobs: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Returns the gradients of a loss with another weight for every token, some negative or
    zero."""
    several = len(logprobs) > 1
    upstream = torch.linspace(-1, 1, len(logprobs)) if several else torch.ones(1)
    return torch.autograd.grad(logprobs @ upstream.to(logprobs.dtype), leaves)


def assert_same_at_scale(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Asserts that every number is within `tolerance` times the largest wanted one (or 1)."""
    scale = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(got.double(), wanted.double(), atol=tolerance * scale, rtol=0.0)


def assert_same_gradients(
    ours: Tensor, theirs: Tensor, leaves: list[Tensor], tolerance: float = 1e-5
) -> None:
    found, wanted = gradients(ours, leaves), gradients(theirs, leaves)
    for leaf, got, right in zip(leaves, found, wanted, strict=True):
        assert got.dtype == leaf.dtype
        assert_same_at_scale(got, right, tolerance)


class Watch(TorchDispatchMode):
    """Keeps all storages that operations return, so that no address comes twice."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages.setdefault(storage.data_ptr(), storage)
        return result

    def allocated(self) -> list[int]:
        """Returns the float32 numbers in each new storage, the largest first."""
        new = [one.nbytes() // 4 for at, one in self.storages.items() if at not in self.known]
        return sorted(new, reverse=True)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 50),
    temperature=st.sampled_from([0.5, 1.0, 1.3]),
    bias=st.booleans(),
    transform=st.builds(
        LogitTransform, st.sampled_from([1.0, 0.0625, 8.0]), st.sampled_from([None, 5.0])
    ),
    rows=st.sampled_from([3, 100]),
)
def test_chunks_and_blocks_of_rows_change_neither_values_nor_gradients(
    tokens: int, chunk: int, temperature: float, bias: bool, transform: LogitTransform, rows: int
) -> None:
    hidden, weight, labels, offset = inputs(tokens, bias)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    settings = {"temperature": temperature, "transform": transform}
    theirs = naive(hidden, weight, labels, offset, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lrl.training.logprobs._Softmax._blocks",
            lambda _, logits: (slice(at, at + rows) for at in range(0, len(logits), rows)),
        )
        ours = token_logprobs(hidden, weight, labels, bias=offset, chunk_tokens=chunk, **settings)
        assert_same_at_scale(ours, theirs, 1e-5)
        # Scale and temperature multiply the gradient, and float32's rounding with it.
        tolerance = 1e-5 * max(1.0, transform.scale / temperature)
        assert_same_gradients(ours, theirs, leaves, tolerance)


def test_no_token_keeps_the_graph() -> None:
    hidden, weight, labels, _ = inputs(3)
    token_logprobs(hidden[:0], weight, labels[:0]).sum().backward()
    assert weight.grad is not None and not weight.grad.any()
    assert hidden.grad is not None and not hidden.grad.any()


def test_a_retained_graph_gives_the_same_gradients_twice() -> None:
    hidden, weight, labels, _ = inputs(9)
    loss = token_logprobs(hidden, weight, labels, chunk_tokens=4).sum()
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, weight])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, labels, _ = inputs(9)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(token_logprobs(hidden, weight, labels).sum(), hidden, create_graph=True)


def test_no_table_of_tokens_by_vocabulary_and_one_gradient_of_the_head_are_allocated() -> None:
    hidden, weight, labels, _ = inputs(40)
    with Watch([hidden, weight, labels]) as watch:
        token_logprobs(hidden, weight, labels, chunk_tokens=4).sum().backward()
    largest, *others = watch.allocated()
    # The head's gradient, once; the logits of all tokens are 40 * VOCABULARY.
    assert largest == VOCABULARY * WIDTH
    assert max(others) == 40 * WIDTH  # the hidden states'
    assert 4 * VOCABULARY in others  # a chunk of logits


@pytest.mark.parametrize(
    ("fused", "kind"), [(False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)]
)
def test_log_probs_and_gradients_in_each_format_are_those_of_the_formula(
    fused: bool, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    # tests/training/test_kernels.py generates code.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    _compiled.cache_clear()
    hidden, weight, labels, offset = inputs(23, bias=True)
    leaves = [leaf.detach().to(kind).requires_grad_() for leaf in (hidden, weight, offset)]
    transform = LogitTransform(0.5, 5.0)
    settings = {"bias": leaves[2], "temperature": 0.7, "transform": transform}
    ours = token_logprobs(*leaves[:2], labels, chunk_tokens=10, fused=fused, **settings)
    theirs = naive(*leaves[:2], labels, **settings)
    assert ours.dtype == torch.float32
    assert_same_at_scale(ours, theirs, 1e-5 if kind == torch.float32 else 2e-2)
    assert_same_gradients(ours, theirs, leaves, 2e-5 if kind == torch.float32 else 3e-2)
    _compiled.cache_clear()


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_are_those_of_a_linear_layer_in_half_precision_and_their_softmax_is_in_float32(
    autocast: bool,
) -> None:
    hidden, weight, labels, offset = inputs(20, bias=True)
    kind = torch.float32 if autocast else torch.bfloat16
    leaves = [leaf.detach().to(kind).requires_grad_() for leaf in (hidden, weight, offset)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = token_logprobs(*leaves[:2], labels, bias=leaves[2], temperature=0.7)
        logits = torch.nn.functional.linear(*leaves)
    assert logits.dtype == torch.bfloat16
    wanted = (logits.float() / 0.7).log_softmax(-1)[torch.arange(20), labels]
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-6)
    assert_same_gradients(ours, wanted, leaves, 1e-2)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, LogitTransform()),
        ({"final_logit_softcapping": 30.0}, LogitTransform(cap=30.0)),
        ({"final_logit_softcapping": None}, LogitTransform()),
        ({"logits_scaling": 8.0}, LogitTransform(scale=0.125)),
        ({"logit_scale": 0.0625}, LogitTransform(scale=0.0625)),
        ({"logits_mup_width_multiplier": 24.0}, LogitTransform(scale=1 / 24)),
        ({"logits_soft_cap": 30.0}, LogitTransform(cap=30.0)),
        ({"output_logit_soft_cap": 15.0}, LogitTransform(cap=15.0)),
    ],
)
def test_logit_changes_are_read_from_the_config(config: dict, expected: LogitTransform) -> None:
    assert LogitTransform.from_config(SimpleNamespace(**config)) == expected
