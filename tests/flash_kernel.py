"""A kernel of flash attention for CPUs, with the rules of torch's own (`flash_api.cpp` in torch).

It stands for `aten::_flash_attention_forward` and `_backward`, which have one for CUDA alone: the
same arguments, shapes and refusals. It computes in float64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@contextmanager
def flash_kernel(exact: bool = False) -> Iterator[list[tuple[int, int]]]:
    """Gives torch the kernel in the block; yields the queries and keys of each forward pass.

    Args:
        exact: It takes float32 and float64, too.
    """
    calls: list[tuple[int, int]] = []
    dtypes = SIXTEEN_BITS + ((torch.float32, torch.float64) if exact else ())

    def forward(query: Tensor, key: Tensor, value: Tensor, *more: Any, **named: Any) -> Any:
        calls.append((len(query), len(key)))
        return _forward(dtypes, query, key, value, *more, **named)

    kernels = torch.library.Library("aten", "IMPL", "CPU")
    kernels.impl("_flash_attention_forward", forward)
    kernels.impl("_flash_attention_backward", _backward)
    try:
        yield calls
    finally:
        kernels._destroy()


def _forward(
    dtypes: tuple[torch.dtype, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *more: Any,
    **window: Any,
) -> tuple[Tensor, ...]:
    *bounds, dropout, causal, debug = more
    assert not dropout and not debug
    if query.dtype not in dtypes:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    out = torch.full_like(query, torch.nan)
    sums = torch.full((query.shape[1], len(query)), torch.nan, dtype=_float(query))
    for queries, keys in _sequences(query, key, value, *bounds):
        scores = _scores(query[queries], key[keys], causal, **window)
        values = _grouped(value[keys], query.shape[1])
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        sums[:, queries] = scores.logsumexp(-1).to(sums.dtype)
    random = torch.zeros(2, dtype=torch.uint64)
    return out, sums, random, torch.zeros((), dtype=torch.uint64), query.new_zeros(0)


def _backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    *more: Any,
    scale: float | None = None,
    **window: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the output and the log-sum-exp that it is given, as the real one."""
    *bounds, _, causal, random, unused = more
    assert out.dtype == d_out.dtype == query.dtype
    assert out.shape == d_out.shape == query.shape and sums.shape == query.shape[1::-1]
    assert random.dtype == unused.dtype == torch.uint64
    gradients = [torch.full_like(each, torch.nan) for each in (query, key, value)]
    heads, factor = query.shape[1], query.shape[2] ** -0.5 if scale is None else scale
    for queries, keys in _sequences(query, key, value, *bounds):
        scores = _scores(query[queries], key[keys], causal, factor, **window)
        weights = (scores - sums[:, queries, None].double()).exp()
        upstream = d_out[queries].double()
        delta = (out[queries].double() * upstream).sum(-1).T[..., None]
        of_weights = torch.einsum("qhd,khd->hqk", upstream, _grouped(value[keys], heads))
        of_scores = factor * weights * (of_weights - delta)
        found = (
            torch.einsum("hqk,khd->qhd", of_scores, _grouped(key[keys], heads)),
            torch.einsum("hqk,qhd->khd", of_scores, query[queries].double()),
            torch.einsum("hqk,qhd->khd", weights, upstream),
        )
        for gradient, one, where in zip(gradients, found, (queries, keys, keys), strict=True):
            groups = one.unflatten(1, (gradient.shape[1], -1)).sum(2)
            gradient[where] = groups.to(gradient.dtype)
    return gradients[0], gradients[1], gradients[2]


def _sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
) -> Iterator[tuple[slice, slice]]:
    """Yields the queries and the keys of each sequence, after the real kernel's checks."""
    assert query.dtype == key.dtype == value.dtype
    assert all(each.stride(-1) == 1 for each in (query, key, value))
    assert key.shape == value.shape and query.shape[2] == key.shape[2]
    assert query.shape[2] % 8 == 0 and query.shape[2] <= 256
    assert query.shape[1] % key.shape[1] == 0
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert query_ends.is_contiguous() and key_ends.is_contiguous()
    assert len(query_ends) == len(key_ends) > 1
    assert (query_ends[0], query_ends[-1]) == (0, len(query))
    assert (key_ends[0], key_ends[-1]) == (0, len(key))
    assert type(longest_query) is type(longest_key) is int
    assert query_ends.diff().max() <= longest_query and key_ends.diff().max() <= longest_key
    # Of a sequence without keys the real one leaves the log-sum-exp infinite.
    assert query_ends.diff().min() > 0 and key_ends.diff().min() > 0
    bounds = (
        [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]
        for ends in (query_ends.tolist(), key_ends.tolist())
    )
    yield from zip(*bounds, strict=True)


def _scores(
    query: Tensor,
    key: Tensor,
    causal: bool,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Tensor:
    """Returns float64 [heads, queries, keys]; the diagonal ends at the last of both."""
    factor = query.shape[2] ** -0.5 if scale is None else scale
    found = factor * torch.einsum("qhd,khd->hqk", query.double(), _grouped(key, query.shape[1]))
    last = torch.arange(len(query))[:, None] + len(key) - len(query)
    place = torch.arange(len(key))
    hidden = torch.zeros(len(query), len(key), dtype=torch.bool)
    if window_size_left is not None and window_size_left >= 0:
        hidden |= place < last - window_size_left
    right = 0 if causal else window_size_right
    if right is not None and right >= 0:
        hidden |= place > last + right
    return found.masked_fill(hidden, -torch.inf)


def _grouped(each: Tensor, heads: int) -> Tensor:
    return each.double().repeat_interleave(heads // each.shape[1], 1)


def _float(query: Tensor) -> torch.dtype:
    """Returns the log-sum-exp's dtype: float32, but of exact numbers float64."""
    return torch.promote_types(query.dtype, torch.float32)
