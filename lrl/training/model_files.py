"""A model's files on ranks of several machines, which need not share a file system.

Rank 0 reads a local folder. A rank that does not see the same folder gets the small files, such as
the config, from rank 0, and the weights over the network.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from transformers import PreTrainedModel

from lrl.distributed.ranks import Ranks, explain_broken_collective
from lrl.errors import ConfigError
from lrl.training.model import ModelSource
from lrl.training.trials import cannot_have_varlen
from lrl.training.varlen import VARLEN, is_flash

log = logging.getLogger(__name__)

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Suffixes of files with weights."""


@contextmanager
def model_files(folder: str, ranks: Ranks) -> Iterator[tuple[str, bool]]:
    """Yields where this rank opens the model that rank 0 has in `folder`, and whether all ranks see
    that folder or load it by its hub name; all ranks call it.

    A rank that does not see it gets a copy of all but the weights.
    """
    if ranks.size == 1:
        yield folder, True
        return
    wanted = ranks.share(_files_in(folder))
    sees = wanted is None or _files_in(folder) == wanted  # None: a name on the hub
    everywhere = ranks.share(all(ranks.gather(sees)))
    if everywhere:
        yield folder, True
        return
    small = {
        name: Path(folder, name).read_bytes()
        for name in wanted or ()
        if ranks.rank == 0 and Path(name).suffix not in WEIGHTS
    }
    small = ranks.share(small)
    if sees:
        yield folder, False
        return
    with TemporaryDirectory(prefix="lrl-model-") as copy:
        for name, content in small.items():
            Path(copy, name).write_bytes(content)
        yield copy, False


def _files_in(folder: str) -> dict[str, tuple[int, int]] | None:
    """Returns the sizes and times of a folder's files by name; None if there is no such folder."""
    directory = Path(folder)
    if not directory.is_dir():
        return None
    found = [(path.name, path.stat()) for path in directory.iterdir() if path.is_file()]
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found}


def open_on_ranks(
    source: ModelSource, device: torch.device | str, ranks: Ranks, in_parts: bool
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Opens a model on all ranks; all of them call it.

    Returns:
        The model on `device`, twice; where a rank does not have its files, rank 0 sends the
        weights. With `in_parts`, for `Sharding.divide`: the model without memory for its weights,
        and on rank 0 the whole one, on the CPU (None on the other ranks).
    """
    named = None if source.attention == VARLEN else source.attention
    tries_varlen = source.takes_flash and named is None
    whole = None
    if in_parts and ranks.rank == 0:  # the CPU has no flash kernel
        masked = None if is_flash(named) else named
        whole = replace(source, attention=masked, takes_flash=False).open()
    with model_files(source.folder, ranks) as (here, everywhere):
        opened = replace(source, folder=here, attention=named)
        if in_parts:
            network = opened.open_empty()
        elif everywhere or ranks.rank == 0:
            network = opened.open(device)
        else:
            network = opened.open_empty()
            network._apply(
                lambda one: torch.empty_like(one, device=device) if one.is_meta else one.to(device)
            )
            network.tie_weights()
    if not in_parts:
        whole = network
    if not in_parts and not everywhere:
        with explain_broken_collective():
            for tensor in network.state_dict().values():
                dist.broadcast(tensor, 0)
    if tries_varlen:
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
