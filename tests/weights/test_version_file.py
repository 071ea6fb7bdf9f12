"""The number formats of the weights on the wire."""

from __future__ import annotations

import pytest
import torch

from lrl.system.ranks import Ranks
from lrl.training.pieces import piece_of
from lrl.weights.version_file import TensorSpec, spec_of

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
