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
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lrl.distributed.ranks import Ranks
from lrl.training.lora import held_adapters
from lrl.training.model import layer_of, unique_tensors
from lrl.training.sharding import whole_on
from lrl.weights.adapters import DOWN, UP


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


def checkpoint_pieces(network: PreTrainedModel, ranks: Ranks) -> Iterator[Piece]:
    """Yields this rank's rows of all weights; a collective of all ranks, which yield the same names
    in the same order."""
    layers = groupby(unique_tensors(network), key=lambda item: layer_of(item[0]))
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
                yield piece_of(saved_as, held[name], ranks)
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
    (`lrl.weights.adapters`)."""
    for name, down, up, scale in held_adapters(network):
        yield piece_of(name + DOWN, down, ranks)
        piece = piece_of(name + UP, up, ranks)
        yield piece._replace(rows=scale * piece.rows)


def piece_of(name: str, weight: Tensor, ranks: Ranks) -> Piece:
    """Returns this rank's rows of a weight."""
    shape = tuple(weight.shape)
    if not isinstance(weight, DTensor):
        return _share(name, shape, 0, weight, ranks.rank, ranks.size)
    mesh = weight.device_mesh
    split = [
        at
        for at, placement in enumerate(weight.placements)
        if not placement.is_replicate() and mesh.size(at) > 1
    ]
    if not split:
        return _share(name, shape, 0, weight.to_local(), ranks.rank, ranks.size)
    placement = weight.placements[split[0]]
    if len(split) > 1 or type(placement) is not Shard or placement.dim != 0:
        return _share(name, shape, 0, weight.full_tensor(), ranks.rank, ranks.size)
    # Ranks that are not in the mesh, neighbours by tensor parallelism, hold the same.
    together = ranks.size // mesh.size()
    place = mesh.get_coordinate()
    assert place is not None, "every rank is in a mesh of its weights"
    copy = 0
    for at, coordinate in enumerate(place):
        if at != split[0]:
            copy = copy * mesh.size(at) + coordinate
    copies = mesh.size() // mesh.size(split[0])
    start = min(shape[0], place[split[0]] * -(-shape[0] // mesh.size(split[0])))
    number = copy * together + ranks.rank % together
    return _share(name, shape, start, weight.to_local(), number, copies * together)


def _share(
    name: str, shape: tuple[int, ...], start: int, rows: Tensor, number: int, copies: int
) -> Piece:
    """Returns the share of copy `number` of rows that `copies` ranks hold."""
    rows = rows.reshape(1) if not shape else rows
    each = -(-len(rows) // copies)
    own = rows[number * each : (number + 1) * each]
    return Piece(name, shape, start + min(len(rows), number * each), own)
