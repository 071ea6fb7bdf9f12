"""The rows of each weight that a rank sends to the generators.

A sharded weight is divided along its first dimension (FSDP2), and a rank sends the rows that it
holds. Ranks that hold the same rows, as replicas or by data parallelism, divide them. So no rank
gathers a weight, except where its rows are no rows of the checkpoint's tensor: a weight that is
divided along two dimensions (tensor parallelism) is gathered by all for a moment, and a layer that
transformers keeps in another layout (the experts of a mixture) by one rank, each by another one.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

from lrl.distributed.ranks import Ranks
from lrl.training.lora import adapted_layers, factors_of, held_adapters, is_adapter, plain
from lrl.training.merging import DOWN, UP, merge
from lrl.training.model import layer_of, unique_tensors
from lrl.training.sharding import whole_on


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
    adapted = {f"{name}.weight": layer for name, layer in adapted_layers(network)}
    found = ((plain(name), one) for name, one in unique_tensors(network) if not is_adapter(name))
    # Sorted, since transformers sorts the weights of a model that it has opened from its files, by
    # the same key, and not those of one that has got them from rank 0.
    tensors = sorted(found, key=lambda item: dot_natural_key(item[0]))
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
                layer_of_it = adapted.get(name)
                yield (
                    piece if layer_of_it is None else _merged(piece, layer_of_it, ranks, merged_in)
                )
        if not names:
            continue
        # What is left has another layout in a checkpoint.
        root = number % ranks.size
        whole = {name: whole_on(held[name], root) for name in names.values()}
        for saved_as, tensor in revert_weight_conversion(network, whole).items():
            if not any(isinstance(held[name], DTensor) for name in names.values()):
                yield piece_of(saved_as, tensor, ranks)
            elif tensor.is_meta:
                none = torch.empty((0, *tensor.shape[1:]), dtype=tensor.dtype)
                yield Piece(saved_as, tuple(tensor.shape), 0, none)
            else:
                yield Piece(saved_as, tuple(tensor.shape), 0, tensor)


def adapter_pieces(network: PreTrainedModel, ranks: Ranks) -> Iterator[Piece]:
    """Yields this rank's rows of all adapters, under their names on the wire
    (`lrl.weights.version_file`)."""
    for name, down, up, scale in held_adapters(network):
        yield piece_of(name + DOWN, down, ranks)
        piece = piece_of(name + UP, up, ranks)
        yield piece._replace(rows=scale * piece.rows)


def _merged(piece: Piece, layer: LoraLayer, ranks: Ranks, dtype: torch.dtype) -> Piece:
    """Returns rows of a weight with its adapters; a collective if they are sharded."""
    down, up, scale = factors_of(layer)
    rows = merge(
        piece.name,
        piece.rows,
        down=down.full_tensor() if isinstance(down, DTensor) else down,
        up=scale * piece_of(piece.name, up, ranks).rows,  # divided as W is: both have its rows
        dtype=dtype,
        start=piece.start,
        rows=piece.shape[0],
    )
    return piece._replace(rows=rows)


def piece_of(name: str, weight: Tensor, ranks: Ranks) -> Piece:
    """Returns this rank's rows of a weight."""
    held = _held(weight, ranks)
    rows = held.rows if weight.shape else held.rows.reshape(1)
    each = -(-len(rows) // held.copies)
    start = min(len(rows), held.copy * each)
    own = rows[start : start + each]
    return Piece(name, tuple(weight.shape), start=held.start + start, rows=own)


class Held(NamedTuple):
    """The rows of a weight that a rank can send, as others can."""

    rows: Tensor
    start: int
    """Number of the first row."""
    copy: int
    """Of this rank among those that hold the same."""
    copies: int


def _held(weight: Tensor, ranks: Ranks) -> Held:
    if not isinstance(weight, DTensor):
        return Held(weight, 0, copy=ranks.rank, copies=ranks.size)
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
        return Held(weight.full_tensor(), 0, copy=ranks.rank, copies=ranks.size)
    place = mesh.get_coordinate()
    assert place is not None, "every rank is in a mesh of its weights"
    shards, shard = mesh.size(split[0]), place[split[0]]
    replica = 0
    for at, coordinate in enumerate(place):
        if at != split[0]:
            replica = replica * mesh.size(at) + coordinate
    # Neighbours by tensor parallelism hold the same, and are not in the mesh.
    neighbours = ranks.size // mesh.size()
    return Held(
        weight.to_local(),
        start=min(weight.shape[0], shard * -(-weight.shape[0] // shards)),
        copy=replica * neighbours + ranks.rank % neighbours,
        copies=mesh.size() // shards * neighbours,
    )
