"""The transport within one GPU: vLLM's own trainer engine sends the policy, with CUDA's calls
played on a CPU.

What is played: the handle of a buffer (the buffer itself), the number of the device, and its
streams. All else is vLLM's and lrl's code, on both ends: how tensors are packed, what travels, and
how a worker takes a buffer apart.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrl.weights import ipc
from lrl.weights.ipc import Ipc

DEVICE = "GPU-1"


class Generator:
    """The control plane of one generator, and its worker's end of a buffer."""

    def __init__(self, dtype: str) -> None:
        self.participants = [
            SimpleNamespace(server=SimpleNamespace(settings=SimpleNamespace(dtype=dtype)))
        ]
        self.calls: list[str] = []
        self.buffer = torch.empty(0)
        self.weights: dict[str, torch.Tensor] = {}

    def init(self, info: dict[str, Any]) -> None:
        self.calls.append("init")
        assert info == {"packed": True}

    def update(self, body: Callable[[Any], dict[str, Any]]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

        self.calls.append("update")
        info = body(self)
        assert "ipc_handles" not in info  # no JSON can hold them
        assert set(pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))) == {DEVICE}
        sizes = info["tensor_sizes"]
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        found = unpack_tensor(
            self.buffer[: sum(sizes)], info["names"], info["shapes"], dtypes, sizes
        )
        self.weights |= {name: tensor.clone() for name, tensor in found}


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    """A generator in bfloat16 whose buffers arrive although there is no GPU."""
    from vllm.distributed.weight_transfer import packed_tensor

    generator = Generator("bfloat16")
    empty = torch.empty

    def reduce_tensor(tensor: torch.Tensor) -> tuple[None, tuple[int, str]]:
        generator.buffer = tensor
        return None, (0, "handle")

    def stream(*device: Any) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)

    monkeypatch.setattr(packed_tensor, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **other: empty(*shape, **other))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=DEVICE)
    )
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    return generator


def policy() -> dict[str, torch.Tensor]:
    """Six matrices, two vectors of which one has an odd number of numbers, and one tensor larger
    than a buffer."""
    draw = torch.Generator().manual_seed(0)
    matrices = {f"layers.{layer}.weight": torch.randn(7, 5, generator=draw) for layer in range(6)}
    vectors = {"norm": torch.randn(5, generator=draw), "bias": torch.randn(8, generator=draw)}
    return matrices | vectors | {"embedding": torch.randn(40, 5, generator=draw)}


def test_vllms_own_engine_delivers_every_tensor_of_every_version(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "BUFFER_BYTES", 150)  # two matrices
    weights = policy()
    transport = Ipc()
    transport.connect(generator, lambda: iter(weights.items()), "run-0")  # type: ignore[arg-type]
    for _ in range(2):
        weights["embedding"] += 1.0
        generator.weights.clear()
        transport.send(generator)  # type: ignore[arg-type]
        expected = {
            name: value.bfloat16() if value.dim() > 1 else value for name, value in weights.items()
        }
        assert generator.weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(generator.weights[name], value, rtol=0, atol=0)
    transport.close()
    assert generator.calls[0] == "init"
    assert generator.calls.count("update") > 4, "one bounded buffer, many times"


@pytest.mark.parametrize(
    ("largest", "size"), [(10, ipc.BUFFER_BYTES), (2 * ipc.BUFFER_BYTES, 2 * ipc.BUFFER_BYTES)]
)
def test_the_room_it_takes_is_a_buffer_that_holds_the_largest_tensor_and_its_copy(
    largest: int, size: int
) -> None:
    assert Ipc.buffer_bytes(largest) == 2 * size
