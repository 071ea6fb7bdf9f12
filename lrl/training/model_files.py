"""A model on all ranks. Rank 0 alone reads its files; the others, whose machines need not have them,
get its config and weights from rank 0."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from transformers import PreTrainedModel

from lrl.errors import ConfigError
from lrl.system.ranks import Ranks, explain_broken_collective
from lrl.training.model import ModelSource, open_config
from lrl.training.sharding import give_memory
from lrl.training.trials import cannot_have_varlen
from lrl.training.varlen import VARLEN, is_flash

log = logging.getLogger(__name__)


def open_on_ranks(
    source: ModelSource, device: torch.device | str, ranks: Ranks, in_parts: bool
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Opens a model on all ranks; all of them call it.

    Returns:
        The model on `device`, twice. With `in_parts`, for `Sharding.divide`: the model without
        memory for its weights, and on rank 0 the whole one, on the CPU (None on the other ranks).
    """
    named = None if source.attention == VARLEN else source.attention
    opened = replace(source, attention=named)
    whole = config = None
    if ranks.rank == 0:
        masked = None if is_flash(named) else named  # the CPU has no flash kernel
        on_cpu = replace(source, attention=masked, takes_flash=False)
        whole = on_cpu.open() if in_parts else opened.open(device)
        config = open_config(source.folder)
    config = ranks.share(config)
    network = opened.open_empty(config) if in_parts or whole is None else whole
    if not in_parts and ranks.size > 1:
        # transformers keeps some weights of some families in float32 when it opens files.
        own = {} if whole is None else {k: one.dtype for k, one in whole.state_dict().items()}
        dtypes = ranks.share(own)
        if whole is None:
            for name, tensor in network.state_dict(keep_vars=True).items():
                tensor.data = tensor.data.to(dtypes[name])
            give_memory(network, device, device)
        with explain_broken_collective():
            for tensor in network.state_dict().values():
                dist.broadcast(tensor, 0)
        whole = network
    if source.takes_flash and named is None:
        _choose_attention(network, whole, source, ranks)
    return network, whole


def _choose_attention(
    network: PreTrainedModel, whole: PreTrainedModel | None, source: ModelSource, ranks: Ranks
) -> None:
    """Gives a model lrl's own attention if rank 0, which has it whole, finds that it can have it."""
    why = ranks.share("" if whole is None else cannot_have_varlen(whole))
    if why and source.attention is not None:
        raise ConfigError(
            f"model.attention is {source.attention!r}, and {source.folder!r} cannot have it: {why}. "
            "Leave it out."
        )
    if not why:
        network.set_attn_implementation(VARLEN)
    chosen = network.config._attn_implementation
    reason = why and f", because {why}"
    rank_zero_only(log.info)("model=%r: attention %s%s", source.folder, chosen, reason)
