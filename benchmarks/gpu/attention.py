"""Kernels of attention beside each other: sdpa's backends with and without a mask, and lrl's
attention over sequences (`lrl.training.varlen`).

    python -m benchmarks.gpu.attention
    python -m benchmarks.gpu.attention --device cpu --tokens 64 --lengths 16     a rehearsal
    python -m benchmarks.gpu.attention --prompt 2000 --branches 8                trees of prompts

The heads are those of Qwen2.5-1.5B, in bfloat16. Rows of equal sequences, each as long as its row,
go through forward and backward, so every way computes the same. With `--prompt` a row is a tree:
that prompt, read once, and branches of the lengths behind it; the ways without a mask that know no
trees are left out. On a CPU, which has no kernel for it, lrl's attention computes whole squares.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import arguments, records
from benchmarks.gpu.machine import MACHINES, Machine
from benchmarks.gpu.rows import make_parser, parse
from lrl.training import varlen
from lrl.training.collate import fill_rows, text_sequence
from lrl.training.prefix_tree import PrefixTree
from lrl.types import MicroBatch

HEADS, KV_HEADS, HEAD_SIZE = 12, 2, 128
REPEATS, WARM_UP = 10, 3

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def layout(rows: int, length: int, prompt: int, branches: int) -> MicroBatch:
    """Rows of one sequence, or of a tree."""
    if not prompt:
        return fill_rows([[PrefixTree([text_sequence([0] * length)])]] * rows, temperature=1.0)
    samples = [text_sequence([0] * length) for _ in range(branches)]
    for sample in samples:
        sample.prompt = [0] * (prompt + 1)
    return fill_rows([[PrefixTree(samples, prompt)]] * rows, temperature=1.0)


def ways(device: str, micro: MicroBatch) -> dict[str, Way]:
    rows, length = micro.input_ids.shape
    micro = micro.to(device)
    bounds = micro.bounds
    assert bounds is not None
    ends = micro.readers_end
    place = torch.arange(length, device=device)
    allowed = (place[:, None] >= place)[None].expand(rows, -1, -1)
    if ends is not None:
        allowed = allowed & (place[:, None] < ends[:, None])
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bfloat16, device=device)
    mask.masked_fill_(~allowed[:, None], torch.finfo(torch.bfloat16).min)

    def sdpa(backend: SDPBackend, **how: Any) -> Way:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **how)

        return attend

    def over_sequences(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        module, scaling = torch.nn.Identity(), HEAD_SIZE**-0.5
        found, _ = varlen.attend(module, query, key, value, None, bounds=bounds, scaling=scaling)
        return found.transpose(1, 2)

    masked = {
        "sdpa, efficient, mask": sdpa(SDPBackend.EFFICIENT_ATTENTION, attn_mask=mask),
        "sdpa, cuDNN, mask": sdpa(SDPBackend.CUDNN_ATTENTION, attn_mask=mask),
        "sdpa, math, mask": sdpa(SDPBackend.MATH, attn_mask=mask),
        varlen.VARLEN: over_sequences,
    }
    causal = {
        "sdpa, flash, causal": sdpa(SDPBackend.FLASH_ATTENTION, is_causal=True),
        "sdpa, cuDNN, causal": sdpa(SDPBackend.CUDNN_ATTENTION, is_causal=True),
    }
    return masked if ends is not None else masked | causal


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


def main() -> None:
    parser = make_parser("attention", __doc__)
    arguments.add(
        parser,
        tokens=(16384, "of all rows"),
        lengths=([512, 4096], "of a row, or of a branch"),
        prompt=(0, "tokens of each tree's prompt; 0 for rows of one sequence"),
        branches=(8, "of each tree"),
    )
    args = parse(parser)
    machine = MACHINES[args.device]()
    for length in args.lengths:
        of_row = args.prompt + args.branches * (length + 1) if args.prompt else length
        rows = max(1, args.tokens // of_row)
        micro = layout(rows, length, args.prompt, args.branches)
        tree = {"prompt": args.prompt, "branches": args.branches} if args.prompt else {}
        for name, way in ways(machine.device, micro).items():
            settings = {
                "row": name,
                "rows": rows,
                "length": length,
                "machine": machine.name,
                **tree,
            }
            try:
                found = measure(way, machine, *micro.input_ids.shape)
            except (RuntimeError, NotImplementedError, ImportError, TypeError) as error:
                found = {"works": False, "error": str(error).partition("\n")[0][:200]}
            records.append(args.out, settings | found)
            print(settings | found, flush=True)


if __name__ == "__main__":
    main()
