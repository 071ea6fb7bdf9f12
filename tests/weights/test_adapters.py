"""Adapters that are merged in 16 bits: what arrives of an update that is smaller than the distance
of two numbers.

Covers lrl/training/merging.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lrl.training.merging import DOWN, UP, rounded
from lrl.weights.version_file import merged


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def received(base: Tensor, down: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what a generator in `dtype` computes with, in float32."""
    ((_, weight),) = merged([("w", base)], {"w" + DOWN: down, "w" + UP: up}, dtype)
    assert weight.dtype == dtype
    return weight.float()


def test_what_the_product_of_a_small_update_adds_arrives_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    base = (0.05 * torch.randn(512, 512)).to(dtype)
    distance = torch.finfo(dtype).eps * 0.05
    inputs = torch.randn(64, 512)
    down = inputs[:4] / 512**0.5  # as the gradient of these inputs makes them
    up = 0.02 * distance * torch.randn(512, 4)
    wanted = inputs[:4] @ (up @ down).T

    def arrived(weight: Tensor) -> float:
        """Returns the share of the product's change that is there; what is added at random has no
        part in it."""
        found = inputs[:4] @ (weight - base.float()).T
        return (found.flatten() @ wanted.flatten() / wanted.norm().square()).item()

    assert arrived(received(base, down, up, dtype)) == pytest.approx(1, abs=0.15)
    nearest = (base.float() + up @ down).to(dtype).float()
    assert arrived(nearest) < 0.7 and (nearest != base.float()).float().mean() < 0.02, (
        "which the nearest would lose"
    )


def test_only_weights_that_an_update_moves_differ_and_each_by_one_number_at_most(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    base = torch.randn(256, 256).to(dtype)
    down, up = torch.randn(4, 256), torch.zeros(256, 4)
    assert torch.equal(received(base, down, up, dtype), base.float()), (
        "the first version is W itself"
    )
    up[:128] = 1e-5 * torch.randn(128, 4)
    first, again = (received(base, down, up, dtype) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(first[128:], base[128:].float()) and not torch.equal(first, base.float())
    exact = base.float() + up @ down
    assert ((first - exact).abs() <= 2 * torch.finfo(dtype).eps * exact.abs()).all()


def test_some_rows_of_a_weight_are_rounded_as_in_the_whole(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 32)
    whole = rounded(weight, dtype, seed=1)
    parts = [rounded(weight[at : at + 24], dtype, 1, start=at, rows=64) for at in (0, 24, 48)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("number", [1.0001, -3.3, 2e-3])
def test_the_mean_of_a_rounded_number_is_the_number(dtype: torch.dtype, number: float) -> None:
    found = rounded(torch.full((1_000_000,), number), dtype, seed=1).double()
    assert found.mean().item() == pytest.approx(number, rel=2e-5)
    assert len(found.unique()) == 2
