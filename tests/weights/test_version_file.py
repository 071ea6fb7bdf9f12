"""The weights on the wire: their number formats, and an order in which each is at its place."""

from __future__ import annotations

import pytest
import torch

from lrl.distributed.ranks import Ranks
from lrl.training.pieces import piece_of
from lrl.weights.version_file import TensorSpec, in_file_order, spec_of

HALF, FULL = torch.bfloat16, torch.float32


def sent(weight: torch.Tensor, narrow: torch.dtype | None) -> TensorSpec:
    return spec_of(piece_of("w", weight, Ranks()), narrow)


@pytest.mark.parametrize(
    ("policy", "generator", "travels"), [(FULL, HALF, HALF), (HALF, FULL, HALF), (FULL, None, FULL)]
)
def test_the_narrower_format_travels(
    policy: torch.dtype, generator: torch.dtype | None, travels: torch.dtype
) -> None:
    assert sent(torch.randn(3, 5, dtype=policy), generator) == ("w", travels, (3, 5))


def test_vectors_and_integers_travel_as_they_are() -> None:
    assert sent(torch.ones(9), HALF).dtype is FULL
    assert sent(torch.tensor([[2**40 + 1]]), HALF).dtype is torch.int64


def test_a_tensor_fits_its_place_wherever_those_before_begin() -> None:
    tensors = [
        TensorSpec("half", HALF, (3,)),
        TensorSpec("full", FULL, (5,)),
        TensorSpec("whole", torch.int64, (1,)),
        TensorSpec("seven", HALF, (7,)),
    ]
    ordered = in_file_order(tensors)
    assert set(ordered) == set(tensors)
    for begin in range(len(ordered)):
        offset = 0
        for one in ordered[begin:]:
            assert offset % one.dtype.itemsize == 0
            offset += one.nbytes
