"""The weights on the wire: their number formats, and an order that vLLM can unpack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lrl.weights.transport import Weights
from lrl.weights.wire import Wire

HALF, FULL = torch.bfloat16, torch.float32


def weights_of(*tensors: torch.Tensor) -> Weights:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((f"w{number}", tensor) for number, tensor in enumerate(tensors))

    return weights


@pytest.mark.parametrize(
    ("policy", "generator", "sent"), [(FULL, HALF, HALF), (HALF, FULL, HALF), (FULL, FULL, FULL)]
)
def test_the_narrower_format_travels(
    policy: torch.dtype, generator: torch.dtype, sent: torch.dtype
) -> None:
    weight = torch.randn(3, 5, requires_grad=True)
    wire = Wire(weights_of(weight.to(policy)), generator)
    ((name, found),) = wire
    assert name == "w0" and found.dtype == sent and not found.requires_grad
    torch.testing.assert_close(found, weight.detach().to(policy).to(sent), rtol=0, atol=0)


def test_vectors_and_integers_travel_as_they_are() -> None:
    bias, table = torch.tensor([1.0 + 2**-20]), torch.tensor([[2**40 + 1]])
    sent = dict(Wire(weights_of(torch.ones(9, 1), bias, table), HALF))
    assert (
        torch.equal(sent["w1"], bias)
        and torch.equal(sent["w2"], table)
        and sent["w0"].dtype == HALF
    )


def test_every_tensor_comes_once_and_as_described_and_fits_its_offset_wherever_a_buffer_begins() -> (
    None
):
    tensors = [
        torch.ones(3, dtype=HALF),
        torch.ones(5),
        torch.ones(1, dtype=torch.int64),
        torch.ones(7, dtype=HALF),
    ]
    wire = Wire(weights_of(*tensors), HALF)
    found = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in wire]
    assert found == [tuple(one) for one in wire.tensors]
    assert sorted(name for name, *_ in found) == ["w0", "w1", "w2", "w3"]
    for begin in range(len(wire.tensors)):
        offset = 0
        for one in wire.tensors[begin:]:
            assert offset % one.dtype.itemsize == 0
            offset += one.nbytes


def test_a_pass_reads_every_tensor_once_in_the_order_of_the_policy_and_odd_ones_come_last() -> None:
    """A sharded policy gathers what is read."""
    reads = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in (
            ("matrix", (2, 3)),
            ("odd", (3, 3)),
            ("vector", (5,)),
            ("last", (4, 2)),
        ):
            reads.append(name)
            yield name, torch.ones(shape)

    wire = Wire(weights, HALF)
    reads.clear()
    assert [name for name, _ in wire] == ["matrix", "vector", "last", "odd"]
    assert reads == ["matrix", "odd", "vector", "last"]


def test_the_largest_tensor_is_measured_on_the_wire() -> None:
    assert Wire(weights_of(torch.ones(10, 1), torch.ones(100, 1)), HALF).largest == 200
