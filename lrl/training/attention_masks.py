"""The attention masks of rows that the model cannot build itself.

From positions it builds its own, in which every token reads all before it in its sequence. That is
wrong where samples share their first tokens.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lrl.types import MicroBatch

FULL, SLIDING, INDEXED = "full_attention", "sliding_attention", "indexed_attention"
WITH_MASKS = ("sdpa", "eager")
"""Kinds of attention in transformers that take a mask of lrl's."""


def masks_of(decoder: PreTrainedModel, micro: MicroBatch) -> dict[str, Any]:
    """Returns the `attention_mask` of a model that does not build it itself, by that name.

    A token reads those before it whose `readers_end` lies behind it; in a layer with a sliding
    window only those within the window, counted in positions. The mask is [R, 1, L, L] in the dtype
    of the scores, 0.0 or the least number. A model with both kinds of layers gets a dict of two.
    """
    config = decoder.config
    window = getattr(config, "sliding_window", None)
    ends = micro.readers_end
    if ends is None:
        return {}
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


def _mask(decoder: PreTrainedModel, ends: Tensor, positions: Tensor, window: int | None) -> Tensor:
    length = ends.shape[1]
    reader = torch.arange(length, device=ends.device)[:, None]
    read = reader.T
    allowed = (read <= reader) & (reader < ends[:, None])
    if window is not None:
        allowed &= positions[:, :, None] - positions[:, None] < window
    # Of a bool mask torch makes numbers in each layer, and keeps them all for the backward pass.
    dtype = scores_dtype(decoder)
    found = torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return found[:, None]


def scores_dtype(decoder: PreTrainedModel) -> torch.dtype:
    """Returns the dtype of the attention's scores: autocast's, where it is on."""
    device = decoder.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return decoder.dtype
