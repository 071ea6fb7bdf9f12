"""Chunked log-probs against the naive ones."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lrl.logprobs import LogitTransform, token_logprobs


def inputs(tokens: int, bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(tokens)
    hidden = (0.3 * torch.randn(tokens, 16)).requires_grad_()
    weight = torch.randn(50, 16, requires_grad=True)
    return hidden, weight, torch.randint(50, (tokens,)), torch.randn(50, requires_grad=True) if bias else None


def naive(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float,
    scale: float,
    cap: float | None,
) -> Tensor:
    logits = (
        torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double()) * scale
    )
    if cap:
        logits = cap * torch.tanh(logits / cap)
    return (logits / temperature).log_softmax(-1)[torch.arange(len(labels)), labels]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 50),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.booleans(),
    st.sampled_from([1.0, 0.0625, 8.0]),
    st.sampled_from([None, 5.0]),
)
def test_chunks_change_neither_values_nor_gradients(
    tokens: int, chunk: int, temperature: float, bias: bool, scale: float, cap: float | None
) -> None:
    hidden, weight, labels, offset = inputs(tokens, bias)
    transform = LogitTransform(scale, cap)
    ours = token_logprobs(
        hidden, weight, labels, bias=offset, temperature=temperature, transform=transform, chunk_tokens=chunk
    )
    theirs = naive(hidden, weight, labels, offset, temperature, scale, cap)
    torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=1e-5)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    weights = torch.linspace(-1, 1, tokens)
    for got, wanted in zip(
        torch.autograd.grad(ours @ weights, leaves), torch.autograd.grad(theirs @ weights.double(), leaves), strict=True
    ):
        # Scale and temperature multiply the gradient, and float32's rounding with it.
        torch.testing.assert_close(got, wanted, atol=1e-5 * max(1.0, scale / temperature), rtol=1e-4)


def test_no_token_keeps_the_graph() -> None:
    hidden, weight, labels, _ = inputs(3, False)
    token_logprobs(hidden[:0], weight, labels[:0]).sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_logits_of_all_tokens_are_never_alive_at_once() -> None:
    hidden, weight, labels, _ = inputs(64, False)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        token_logprobs(hidden, weight, labels, chunk_tokens=4)
    assert max(saved, default=0) < 64 * 50


def test_half_precision_weights_give_float32_logprobs() -> None:
    hidden, weight, labels, _ = inputs(9, False)
    ours = token_logprobs(hidden.bfloat16(), weight.bfloat16(), labels)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, token_logprobs(hidden, weight, labels), atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, LogitTransform()),
        ({"final_logit_softcapping": 30.0}, LogitTransform(cap=30.0)),
        ({"final_logit_softcapping": None}, LogitTransform()),
        ({"logits_scaling": 8.0}, LogitTransform(scale=0.125)),
        ({"logit_scale": 0.0625}, LogitTransform(scale=0.0625)),
    ],
)
def test_logit_changes_are_read_from_the_config(config: dict, expected: LogitTransform) -> None:
    assert LogitTransform.from_config(SimpleNamespace(**config)) == expected
