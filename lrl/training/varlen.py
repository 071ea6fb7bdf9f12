"""What keeps the sequences of a row apart in attention: masks, or on GPUs torch's flash kernel over
sequences of different lengths (`varlen`).

A model's own masks, from positions, are wrong where samples share their first tokens: lrl makes
them there. With a mask torch has no flash kernel, so in `varlen` every sequence of a micro-batch
(`lrl.types.SequenceBounds`) is one of the kernel's. In front of the keys of a branch the shared
ones are copied (again for the backward pass), and the kernel aligns its diagonal to the end: one
call computes prompts and branches, with windows, too. (Two calls, merged by log-sum-exp, would
need no copies, but in the prompt's a window would have another width for each query.)

torch's operators are called themselves: `torch.nn.attention.varlen.varlen_attn` has other arguments
in each release since 2.11.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, PreTrainedModel

from lrl.types import MicroBatch, SequenceBounds

FULL, SLIDING, INDEXED = "full_attention", "sliding_attention", "indexed_attention"
WITH_MASKS = ("sdpa", "eager")
"""Kinds of attention in transformers that take a mask of lrl's."""
VARLEN = "varlen"
NO_DROPOUT = 0.0
LARGEST_HEAD = 256
"""Numbers of a head that the kernel has room for; they are a multiple of 8."""


def is_flash(attention: str | None) -> bool:
    """Returns whether an attention is a flash kernel: without masks, in 16 bits, on GPUs alone."""
    return attention == VARLEN or "flash" in (attention or "")


def computes_in(network: PreTrainedModel) -> torch.dtype:
    """Returns the dtype of trials and probes: bfloat16 with a flash kernel, else the weights'."""
    flash = is_flash(network.config._attn_implementation) and network.device.type == "cuda"
    return torch.bfloat16 if flash else network.dtype


def in_its_dtype(network: PreTrainedModel) -> torch.autocast:
    """Returns autocast to that dtype for a model in another; a sharded one casts by itself."""
    dtype = computes_in(network)
    casts = dtype != network.dtype and not isinstance(next(network.parameters()), DTensor)
    return torch.autocast(network.device.type, dtype, enabled=casts)


def arguments(decoder: PreTrainedModel, micro: MicroBatch) -> dict[str, Any]:
    """Returns what a model gets besides tokens and positions, for its attention."""
    attention = decoder.config._attn_implementation
    if not is_flash(attention):
        return masks_of(decoder, micro)
    bounds = micro.bounds
    assert bounds is not None, "collation makes them"
    if attention == VARLEN:
        return {"bounds": bounds}
    # Without them transformers asks the GPU four times a layer.
    return {
        "cu_seq_lens_q": bounds.queries,
        "cu_seq_lens_k": bounds.keys,
        "max_length_q": bounds.longest_query,
        "max_length_k": bounds.longest_key,
    }


def masks_of(decoder: PreTrainedModel, micro: MicroBatch) -> dict[str, Any]:
    """Returns the `attention_mask` of a micro-batch with `readers_end`, by that name: [R, 1, L, L]
    in the dtype of the scores, 0.0 or the least number. A model with windows in some layers gets a
    dict of two."""
    ends = micro.readers_end
    if ends is None:
        return {}
    # Layers that read the best few tokens look for them among those of the mask.
    windows = {FULL: None, INDEXED: None, SLIDING: getattr(decoder.config, "sliding_window", None)}
    masks = {
        kind: _mask(decoder, ends, micro.position_ids, windows[kind])
        for kind in sorted(_layers(decoder.config))
    }
    return {"attention_mask": masks if len(masks) > 1 else masks.popitem()[1]}


def _layers(config: Any) -> set[str]:
    window = getattr(config, "sliding_window", None)
    return set(getattr(config, "layer_types", None) or [SLIDING if window else FULL])


def unknown_layers(config: Any) -> set[str]:
    """Returns the kinds of layers in a decoder's config for which there is no mask here."""
    return _layers(config) - {FULL, INDEXED, SLIDING}


def _mask(decoder: PreTrainedModel, ends: Tensor, positions: Tensor, window: int | None) -> Tensor:
    length = ends.shape[1]
    reader = torch.arange(length, device=ends.device)[:, None]
    read = reader.T
    allowed = (read <= reader) & (reader < ends[:, None])
    if window is not None:
        allowed &= positions[:, :, None] - positions[:, None] < window
    # Of a bool mask torch makes numbers in each layer, and keeps them all for the backward pass.
    dtype = _scores_dtype(decoder.device.type, decoder.dtype)
    found = torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return found[:, None]


def _scores_dtype(device: str, own: torch.dtype) -> torch.dtype:
    """Returns autocast's dtype where it is on, else the tensors' own."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else own


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    bounds: SequenceBounds,
    scaling: float,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes a layer's attention for transformers: from [R, heads, L, D] to [R, L, heads, D].
    `s_aux` are the sinks, [heads]: the scores of a key without a value.

    Raises ValueError for what the kernel does not know; a trial of the model finds it.
    """
    size = query.shape[-1]
    if attention_mask is not None or softcap is not None:
        raise ValueError("the kernel knows neither masks nor a cap on scores")
    if size % 8 or size > LARGEST_HEAD or size != value.shape[-1]:
        raise ValueError(
            f"the kernel has heads of a multiple of 8, up to {LARGEST_HEAD} numbers, and of as many "
            f"in values, not {size} and {value.shape[-1]}"
        )
    device = query.device.type
    dtype = _scores_dtype(device, query.dtype)
    # Rotary positions leave float32 under autocast.
    q, k, v = (each.transpose(1, 2).flatten(0, 1).to(dtype) for each in (query, key, value))
    compute: Any = Flash.apply if device == "cuda" else plain
    how = (s_aux, bounds, scaling, sliding_window)
    found: Tensor = compute(q, k, v, *how)
    return found.unflatten(0, (len(query), -1)), None


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    bounds: SequenceBounds,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Computes what `Flash` does, without a kernel: for trials on the CPU."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in _read(key, value, bounds))
    found = []
    both = (pairwise(ends.tolist()) for ends in (bounds.queries, bounds.keys))
    for queries, keys in zip(*both, strict=True):
        q, k, v = query[slice(*queries)], key[slice(*keys)], value[slice(*keys)]
        before = len(k) - len(q)
        reads = torch.ones(len(q), len(k), dtype=torch.bool).tril(before)
        if window is not None:
            reads = reads.triu(before - window + 1)
        scores = scaling * torch.einsum("qhd,khd->hqk", q, k).masked_fill(~reads, -torch.inf)
        if sinks is not None:
            sunk = sinks[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, sunk.to(scores.dtype)], -1)
        weights = scores.softmax(-1)[..., : len(k)]
        found.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(found)


class Flash(torch.autograd.Function):
    """Attention of [R * L, heads, D] over sequences, by the kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        bounds: SequenceBounds,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        left = -1 if window is None else window - 1
        how = {"scale": scaling, "window_size_left": left, "window_size_right": 0}
        lengths = bounds.queries, bounds.keys, bounds.longest_query, bounds.longest_key
        causal = window is None
        read = _read(key, value, bounds)
        given = (query, *read, *lengths, NO_DROPOUT, causal, False)
        out, sums, *random, _ = torch.ops.aten._flash_attention_forward(*given, **how)
        if sinks is not None:
            whole = torch.logaddexp(sums, sinks[:, None].to(sums.dtype))
            out = (out * (sums - whole).exp().T[..., None]).to(query.dtype)
            sums = whole
        kept = (query, key, value, sinks, out, sums, *random)
        ctx.save_for_backward(*kept)
        ctx.bounds = bounds
        ctx.lengths = (*lengths, NO_DROPOUT, causal)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        query, key, value, sinks, out, sums, *random = ctx.saved_tensors
        # The kernel makes probabilities of `sums`, and needs of `out` its product with `d_out`. So
        # with those of the sinks in them, its gradients are right for sinks, too.
        read = _read(key, value, ctx.bounds)
        given = (d_out.contiguous(), query, *read, out, sums, *ctx.lengths, *random)
        d_query, *of_read = torch.ops.aten._flash_attention_backward(*given, **ctx.how)
        d_key, d_value = (_summed(each, key, ctx.bounds.key_places) for each in of_read)
        d_sinks = None
        if sinks is not None:
            delta = (out.to(sums.dtype) * d_out).sum(-1).T
            d_sinks = -((sinks[:, None] - sums).exp() * delta).sum(1).to(sinks.dtype)
        return d_query, d_key, d_value, d_sinks, None, None, None


def _read(key: Tensor, value: Tensor, bounds: SequenceBounds) -> tuple[Tensor, Tensor]:
    """Returns keys and values as the sequences read them."""
    if bounds.key_places is None:
        return key, value
    return key.index_select(0, bounds.key_places), value.index_select(0, bounds.key_places)


def _summed(gradient: Tensor, of: Tensor, places: Tensor | None) -> Tensor:
    """Returns the gradient of a tensor: the sum over its copies, in float32."""
    if places is None:
        return gradient
    sums = torch.zeros_like(of, dtype=torch.promote_types(of.dtype, torch.float32))
    return sums.index_add_(0, places, gradient.to(sums.dtype)).to(of.dtype)


AttentionInterface.register(VARLEN, attend)
