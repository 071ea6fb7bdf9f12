"""The weights of a model by their names in a checkpoint: whole, or the rows that each rank sends.

A rank sends the rows of a sharded weight that it holds (FSDP2 divides the first dimension). Ranks
that hold the same rows divide them. So no rank gathers a weight, except where its rows are not
those of the checkpoint's tensor: a weight that is divided along two dimensions (tensor parallelism)
is gathered by all for a moment, and a layer that transformers keeps in another layout (the experts
of a mixture) by one rank, each by another one.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

from lrl.system.ranks import Ranks
from lrl.training.lora import adapted_weights, adapter_tensors, factors_of, is_adapter, plain
from lrl.training.merging import merge
from lrl.training.sharding import whole_on


def unique_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of the network as this rank has it, by its first name in memory: tied
    weights have several."""
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def base_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields `unique_tensors` but the adapters, by the names that they have without adapters."""
    found = unique_tensors(network)
    return ((plain(name), tensor) for name, tensor in found if not is_adapter(name))


def whole_tensors(
    network: nn.Module, merged_in: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields `base_tensors` whole on rank 0 (`whole_on`), with their adapters merged in, in the
    format `merged_in` or their own."""
    adapted = adapted_weights(network)
    for name, tensor in base_tensors(network):
        whole = whole_on(tensor)
        if name in adapted:
            down, up = map(whole_on, factors_of(adapted[name]))
            if not whole.is_meta:
                whole = merge(name, whole, down=down, up=up, dtype=merged_in or whole.dtype)
        yield name, whole


def checkpoint_weights(
    network: PreTrainedModel, merged_in: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields `whole_tensors` by their names in a Hugging Face checkpoint, a layer at a time."""
    # transformers keeps some weights, such as experts, in another layout, and only whole layers
    # convert back.
    tensors = whole_tensors(network, merged_in)
    for _, layer in groupby(tensors, key=lambda item: layer_of(item[0])):
        yield from revert_weight_conversion(network, dict(layer)).items()


def layer_of(name: str) -> str:
    """Returns `model.layers.3` for all weights of layer 3; outside of layers the name itself."""
    head, dot, tail = name.partition(".layers.")
    return head + dot + tail.partition(".")[0] if dot else name


class Piece(NamedTuple):
    """The rows of one tensor that this rank sends, maybe none."""

    name: str
    """In a Hugging Face checkpoint."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Number of the first row."""
    rows: Tensor
    """[rows, ...]."""


def checkpoint_pieces(
    network: PreTrainedModel, ranks: Ranks, merged_in: torch.dtype = torch.float32
) -> Iterator[Piece]:
    """Yields this rank's rows of all weights; a collective of all ranks, which yield the same names
    in the same order. Adapters are merged into their weights, in the format `merged_in`."""
    adapted = adapted_weights(network)
    # Sorted, since transformers sorts the weights of a model that it has opened from its files, by
    # the same key, and not those of one that has got them from rank 0.
    tensors = sorted(base_tensors(network), key=lambda item: dot_natural_key(item[0]))
    layers = groupby(tensors, key=lambda item: layer_of(item[0]))
    for number, (_, layer) in enumerate(layers):
        held = dict(layer)
        shapes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in held.items()
        }
        names = {id(shape): name for name, shape in shapes.items()}
        converted = revert_weight_conversion(network, dict(shapes))
        for saved_as, shape in converted.items():
            if name := names.pop(id(shape), None):
                piece = piece_of(saved_as, held[name], ranks)
                if name in adapted:
                    piece = _merged(piece, adapted[name], ranks, merged_in)
                yield piece
        if not names:
            continue
        # What is left has another layout in a checkpoint.
        whole = {name: whole_on(held[name], number % ranks.size) for name in names.values()}
        gathered = any(isinstance(held[name], DTensor) for name in whole)
        for saved_as, tensor in revert_weight_conversion(network, whole).items():
            if not gathered:
                yield piece_of(saved_as, tensor, ranks)
                continue
            none = torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
            yield Piece(saved_as, tuple(tensor.shape), 0, none if tensor.is_meta else tensor)


def adapter_pieces(network: PreTrainedModel, ranks: Ranks) -> Iterator[Piece]:
    """Yields this rank's rows of all adapters."""
    return (piece_of(name, tensor, ranks) for name, tensor in adapter_tensors(network))


def _merged(piece: Piece, layer: LoraLayer, ranks: Ranks, dtype: torch.dtype) -> Piece:
    """Returns rows of a weight with its adapters; a collective if they are sharded."""
    down, up = factors_of(layer)
    rows = merge(
        piece.name,
        piece.rows,
        down=down.full_tensor() if isinstance(down, DTensor) else down,
        up=piece_of(piece.name, up, ranks).rows,  # divided as W is: both have its rows
        dtype=dtype,
        start=piece.start,
        rows=piece.shape[0],
    )
    return piece._replace(rows=rows)


def piece_of(name: str, weight: Tensor, ranks: Ranks) -> Piece:
    """Returns this rank's rows of a weight."""
    rows, first, copy, copies = _held(weight, ranks)
    rows = rows if weight.shape else rows.reshape(1)
    each = -(-len(rows) // copies)
    start = min(len(rows), copy * each)
    own = rows[start : start + each]
    return Piece(name, tuple(weight.shape), start=first + start, rows=own)


def _held(weight: Tensor, ranks: Ranks) -> tuple[Tensor, int, int, int]:
    """Returns the rows of a weight that this rank can send, the number of the first, and the place
    of this rank among so many that hold the same."""
    if not isinstance(weight, DTensor):
        return weight, 0, ranks.rank, ranks.size
    mesh = weight.device_mesh
    split = [
        at
        for at, placement in enumerate(weight.placements)
        if not placement.is_replicate() and mesh.size(at) > 1
    ]
    by_rows = [
        type(weight.placements[at]) is Shard and weight.placements[at].is_shard(0) for at in split
    ]
    if by_rows != [True]:
        return weight.full_tensor(), 0, ranks.rank, ranks.size
    (at,) = split
    shard = mesh.get_local_rank(at)
    first = min(weight.shape[0], shard * -(-weight.shape[0] // mesh.size(at)))
    replicas = mesh.mesh.select(at, shard).flatten().tolist()
    # Neighbours by tensor parallelism hold the same, and are not in the mesh.
    neighbours = ranks.size // mesh.size()
    copy = replicas.index(mesh.get_rank()) * neighbours + ranks.rank % neighbours
    return weight.to_local(), first, copy, len(replicas) * neighbours
