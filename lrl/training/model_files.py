"""A model's files on ranks of several machines, which need not share a file system.

Rank 0 reads a local folder. A rank that does not see the same folder gets the small files, such as
the config, from rank 0, and the weights over the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from lrl.distributed.ranks import Ranks, explain_broken_collective
from lrl.training.model import Dtype, open_empty_network, open_network

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
"""Suffixes of files with weights."""


@contextmanager
def model_files(folder: str, ranks: Ranks) -> Iterator[tuple[str, bool]]:
    """Yields where this rank opens the model that rank 0 has in `folder` (on a rank that does not
    see it, a copy of all but the weights), and whether all ranks see it or load it by its hub name;
    all ranks call it."""
    if ranks.size == 1:
        yield folder, True
        return
    wanted = ranks.share(files_in(folder))
    sees = wanted is None or files_in(folder) == wanted  # None: a name on the hub
    everywhere = ranks.share(all(ranks.gather(sees)))
    if everywhere:
        yield folder, True
        return
    small = {}
    if ranks.rank == 0:
        small = {
            name: Path(folder, name).read_bytes()
            for name in wanted or ()
            if Path(name).suffix not in WEIGHTS
        }
    small = ranks.share(small)
    if sees:
        yield folder, False
        return
    with TemporaryDirectory(prefix="lrl-model-") as copy:
        for name, content in small.items():
            Path(copy, name).write_bytes(content)
        yield copy, False


def files_in(folder: str) -> dict[str, tuple[int, int]] | None:
    """Returns the sizes and times of a folder's files by name; None if there is no such folder."""
    directory = Path(folder)
    if not directory.is_dir():
        return None
    found = [(path.name, path.stat()) for path in directory.iterdir() if path.is_file()]
    return {name: (status.st_size, status.st_mtime_ns) for name, status in found}


def open_on_all_ranks(
    folder: str,
    dtype: Dtype,
    attention: str | None,
    gradient_checkpointing: bool,
    device: torch.device | str,
    ranks: Ranks,
) -> PreTrainedModel:
    """Opens the model whole on all ranks, see `open_network`; where its files are not, rank 0 sends
    the weights."""
    with model_files(folder, ranks) as (here, everywhere):
        settings = here, dtype, attention, gradient_checkpointing
        if everywhere or ranks.rank == 0:
            network = open_network(*settings, device)
        else:
            network = open_empty_network(*settings)
            network._apply(
                lambda one: torch.empty_like(one, device=device) if one.is_meta else one.to(device)
            )
            network.tie_weights()
    if not everywhere:
        with explain_broken_collective():
            for tensor in network.state_dict().values():
                dist.broadcast(tensor, 0)
    return network


def open_in_parts(
    folder: str,
    dtype: Dtype,
    attention: str | None,
    gradient_checkpointing: bool,
    ranks: Ranks,
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Opens the model for `Sharding.divide`; all ranks call it.

    Returns:
        The model without memory for its weights, and on rank 0 the whole one with them.
    """
    settings = dtype, attention, gradient_checkpointing
    whole = open_network(folder, *settings) if ranks.rank == 0 else None
    with model_files(folder, ranks) as (here, _):
        return open_empty_network(here, *settings), whole
