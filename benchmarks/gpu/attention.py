"""Kernels of attention beside each other: sdpa's backends with and without a mask, flex, and torch's
attention over sequences of different lengths.

    python -m benchmarks.gpu.attention
    python -m benchmarks.gpu.attention --device cpu --tokens 64 --lengths 16     a rehearsal

The heads are those of Qwen2.5-1.5B, in bfloat16. Rows of equal sequences, each as long as its row,
go through forward and backward, so every way computes the same. sdpa with a mask is what lrl trains
with today.

Importing the module adds torch's attention over sequences to transformers, as `varlen`:
`python -m benchmarks.gpu.trainer --attention varlen`. On a CPU, which has no kernel for it, each
sequence goes through sdpa.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from benchmarks import arguments, records
from benchmarks.gpu.machine import MACHINES, Machine
from benchmarks.gpu.rows import make_parser, parse

HEADS, KV_HEADS, HEAD_SIZE = 12, 2, 128
REPEATS, WARM_UP = 10, 3
VARLEN = "varlen"

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def over_sequences(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Attention of each token to those before it in its sequence.

    Args:
        query: [T, heads, size].
        key: [T, key-value heads, size].
        value: As `key`.
        ends: Where sequences begin and end, int32 [sequences + 1].
        longest: Tokens of the longest.

    Returns:
        [T, heads, size].
    """
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        shared = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(shared, 1) for each in (key, value))
        found: Tensor = varlen_attn(query, key, value, ends, ends, longest, longest, is_causal=True)
        return found
    bounds = ends.tolist()
    parts = [
        _causal(*(each[None, start:end].transpose(1, 2) for each in (query, key, value)))
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    return torch.cat([part.transpose(1, 2)[0] for part in parts])


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Varlen:
    """The attention of transformers' models over the sequences that positions divide."""

    def __init__(self) -> None:
        self._positions: Tensor | None = None
        self._ends = torch.zeros(0, dtype=torch.int32)
        self._longest = 0

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        position_ids: Tensor,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if position_ids is not self._positions:  # all layers of a pass have the same
            starts = (position_ids.reshape(-1) == 0).nonzero().view(-1).to(torch.int32)
            self._ends = F.pad(starts, (0, 1), value=position_ids.numel())
            self._longest = int(self._ends.diff().max())
            self._positions = position_ids
        flat = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
        dtype = flat[0].dtype
        # The kernel takes 16 bits alone; a trial of the model has the float32 of its weights.
        halves = [each.to(torch.bfloat16) if query.is_cuda else each for each in flat]
        found = over_sequences(*halves, self._ends, self._longest).to(dtype)
        return found.view(len(query), -1, *found.shape[1:]), None


AttentionInterface.register(VARLEN, Varlen())


def ways(device: str, rows: int, length: int) -> dict[str, Way]:
    index = torch.arange(length, device=device)
    allowed = index[:, None] >= index[None]
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bfloat16, device=device)
    mask.masked_fill_(~allowed, torch.finfo(torch.bfloat16).min)
    ends = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)

    def sdpa(backend: SDPBackend, **how: Any) -> Way:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **how)

        return attend

    def varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        return (
            over_sequences(*flat, ends, length)
            .view(rows, length, -1)
            .unflatten(2, (query.shape[1], -1))
            .transpose(1, 2)
        )

    def flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        block = create_block_mask(
            lambda _, __, reader, read: reader >= read, rows, None, length, length, device=device
        )
        attend = torch.compile(flex_attention) if query.is_cuda else flex_attention
        return attend(query, key, value, block_mask=block, enable_gqa=True)

    return {
        "sdpa, efficient, mask": sdpa(SDPBackend.EFFICIENT_ATTENTION, attn_mask=mask),
        "sdpa, cuDNN, mask": sdpa(SDPBackend.CUDNN_ATTENTION, attn_mask=mask),
        "sdpa, math, mask": sdpa(SDPBackend.MATH, attn_mask=mask),
        "sdpa, flash, causal": sdpa(SDPBackend.FLASH_ATTENTION, is_causal=True),
        "sdpa, cuDNN, causal": sdpa(SDPBackend.CUDNN_ATTENTION, is_causal=True),
        "varlen": varlen,
        "flex": flex,
    }


def measure(way: Way, machine: Machine, rows: int, length: int) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = [(rows, heads, length, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [
        torch.randn(shape, dtype=torch.bfloat16, device=machine.device, requires_grad=True)
        for shape in shapes
    ]

    def both() -> Tensor:
        found = way(*inputs)
        torch.autograd.grad(found.float().square().sum(), inputs)
        return found.detach()

    machine.begin()
    before = machine.peak
    seconds = [machine.seconds(both) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
    return {
        "works": True,
        "ms": 1000 * statistics.median(seconds),
        "gib": (machine.peak - before) / 2**30,
        "mean": way(*inputs).float().abs().mean().item(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("attention", __doc__)
    arguments.add(parser, tokens=(16384, "of all rows"), lengths=([512, 4096], "of a row"))
    args = parse(parser, argv)
    machine = MACHINES[args.device]()
    for length in args.lengths:
        rows = max(1, args.tokens // length)
        for name, way in ways(machine.device, rows, length).items():
            settings = {"row": name, "rows": rows, "length": length, "machine": machine.name}
            try:
                found = measure(way, machine, rows, length)
            except (RuntimeError, NotImplementedError, ImportError, TypeError) as error:
                found = {"works": False, "error": str(error).partition("\n")[0][:200]}
            records.append(args.out, settings | found)
            print(settings | found, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
