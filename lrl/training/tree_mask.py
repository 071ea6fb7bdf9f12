"""The attention mask of rows in which samples share their first tokens."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lrl.types import MicroBatch

FULL, SLIDING = "full_attention", "sliding_attention"
WITH_MASKS = ("sdpa", "eager", "flex_attention")
"""Kinds of attention in transformers that take a mask; flash attention knows sequences only."""


def tree_mask(decoder: PreTrainedModel, micro: MicroBatch) -> Any:
    """Returns the mask of a micro-batch with `readers_end`, as the model's `attention_mask`.

    A token reads those before it whose `readers_end` lies behind it; in a layer with a sliding
    window only those within the window, counted in positions. For `sdpa` it is bool [R, 1, L, L],
    for `eager` a number of that shape to add, for `flex_attention` a BlockMask. A model with both
    kinds of layers gets a dict of two.
    """
    config = decoder.config
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [SLIDING if window else FULL])
    windows = {FULL: None, SLIDING: window}
    masks = {kind: _mask(decoder, micro, windows.get(kind)) for kind in sorted(kinds)}
    return masks if len(masks) > 1 else masks.popitem()[1]


def _mask(decoder: PreTrainedModel, micro: MicroBatch, window: int | None) -> Any:
    assert micro.readers_end is not None
    ends, positions = micro.readers_end, micro.position_ids

    def reads(row: Tensor, head: Tensor, reader: Tensor, read: Tensor) -> Tensor:
        """Tells whether the token at index `reader` of a row reads the one at index `read`."""
        found = (read <= reader) & (reader < ends[row, read])
        if window is None:
            return found
        return found & (positions[row, reader] - positions[row, read] < window)

    rows, length = ends.shape
    kind = decoder.config._attn_implementation
    if kind == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(
            reads, B=rows, H=None, Q_LEN=length, KV_LEN=length, device=ends.device
        )
    row = torch.arange(rows, device=ends.device)[:, None, None]
    reader = torch.arange(length, device=ends.device)[None, :, None]
    read = torch.arange(length, device=ends.device)[None, None, :]
    allowed = reads(row, row, reader, read)[:, None]
    if kind == "sdpa":
        return allowed
    least = torch.finfo(decoder.dtype).min
    return torch.zeros_like(allowed, dtype=decoder.dtype).masked_fill(~allowed, least)
