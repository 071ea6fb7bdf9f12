"""The attention masks of rows that the model cannot build itself, or not well.

From positions it builds its own, in which every token reads all before it in its sequence. That is
wrong where samples share their first tokens. And for `flex_attention` one function for all masks is
better: torch compiles the kernel for each function that makes a mask, for one row and for several,
with gradients and without. After eight it computes all scores, unfused.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lrl.types import MicroBatch

FULL, SLIDING, INDEXED = "full_attention", "sliding_attention", "indexed_attention"
WITH_MASKS = ("sdpa", "eager", "flex_attention")
"""Kinds of attention in transformers that take a mask; flash attention knows sequences only."""


def masks_of(decoder: PreTrainedModel, micro: MicroBatch) -> dict[str, Any]:
    """Returns what the model gets besides tokens and positions: its `attention_mask`, if it does
    not build it itself.

    A token reads those before it whose `readers_end` lies behind it; in a layer with a sliding
    window only those within the window, counted in positions. For `sdpa` and `eager` the mask is
    [R, 1, L, L] in the dtype of the scores, 0.0 or the least number; for `flex_attention` a
    BlockMask. A model with both kinds of layers gets a dict of two.
    """
    config = decoder.config
    window = getattr(config, "sliding_window", None)
    ends = micro.readers_end
    if ends is None:
        if config._attn_implementation != "flex_attention" or unknown_layers(config):
            return {}
        ends = sequence_ends(micro.position_ids)
    # Layers that read the best few tokens look for them among those of the mask.
    windows = {FULL: None, INDEXED: None, SLIDING: window}
    masks = {
        kind: _mask(decoder, ends, micro.position_ids, windows[kind])
        for kind in sorted(_layers(config))
    }
    return {"attention_mask": masks if len(masks) > 1 else masks.popitem()[1]}


def _layers(config: Any) -> set[str]:
    window = getattr(config, "sliding_window", None)
    return set(getattr(config, "layer_types", None) or [SLIDING if window else FULL])


def unknown_layers(config: Any) -> set[str]:
    """Returns the kinds of layers in a decoder's config for which there is no mask here."""
    return _layers(config) - {FULL, INDEXED, SLIDING}


def sequence_ends(positions: Tensor) -> Tensor:
    """Returns the index behind the sequence of each token, int64 [R, L], for sequences in rows that
    share nothing; each begins at position 0."""
    length = positions.shape[1]
    index = torch.arange(length, device=positions.device)
    starts = torch.where(positions == 0, index, length)
    # The least start behind each token: the row is read from its end.
    behind = starts.flip(1).cummin(1).values.flip(1)[:, 1:]
    return torch.nn.functional.pad(behind, (0, 1), value=length)


def _mask(decoder: PreTrainedModel, ends: Tensor, positions: Tensor, window: int | None) -> Any:
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
    # Of a bool mask torch makes numbers in each layer, and keeps them all for the backward pass.
    dtype = scores_dtype(decoder)
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def scores_dtype(decoder: PreTrainedModel) -> torch.dtype:
    """Returns the dtype of the attention's scores: autocast's, where it is on."""
    device = decoder.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return decoder.dtype
