"""The transport within one GPU, both ends, with CUDA's handle of a buffer played on a CPU.

Covers lrl/weights/ipc.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lrl.training.lora import LoRA, adapter_tensors
from lrl.weights import ipc
from lrl.weights.ipc import Ipc
from lrl.weights.version_file import merged
from tests.policies import opened
from tests.tiny_policies import adapted, save_tiny
from tests.weights.whole_weights import WholeWeights

CPU = torch.device("cpu")


class Generator:
    """One generator: its engine, behind what travels as JSON."""

    def __init__(self, dtype: str) -> None:
        from lrl.vllm_plugin.engines import IpcEngine

        settings = SimpleNamespace(dtype=dtype)
        self.participants = [SimpleNamespace(server=SimpleNamespace(settings=settings))]
        self.weights: dict[str, torch.Tensor] = {}
        self.updates = 0
        self.engine: Any = IpcEngine.__new__(IpcEngine)
        self.engine.device = CPU
        self.engine.model = SimpleNamespace(load_weights=self.weights.update)

    def init(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def update(self, info: Callable[[Any], dict[str, Any]]) -> None:
        self.updates += 1
        self.engine.update_weights(info(self))


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    """A generator in bfloat16 that opens the trainer's buffer although there is no GPU."""
    from lrl.vllm_plugin import engines

    buffers: list[torch.Tensor] = []

    def reduce_tensor(tensor: torch.Tensor) -> tuple[None, list[int]]:
        buffers.append(tensor)
        return None, list(range(15))

    def rebuild(*arguments: int) -> torch.Tensor:
        assert len(arguments) == 15 and arguments[engines.DEVICE] is CPU.index
        return buffers[-1]

    monkeypatch.setattr(ipc, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(ipc, "BUCKET_BYTES", 150)  # two matrices
    monkeypatch.setattr(ipc, "this_device", lambda: CPU)
    monkeypatch.setattr(engines, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None)
    )
    return Generator("bfloat16")


def policy() -> dict[str, torch.Tensor]:
    """Six matrices, two vectors of which one has an odd number of numbers, a scalar, and one tensor
    larger than a buffer."""
    draw = torch.Generator().manual_seed(0)
    matrices = {f"layers.{layer}.weight": torch.randn(7, 5, generator=draw) for layer in range(6)}
    vectors = {"norm": torch.randn(5, generator=draw), "bias": torch.randn(8, generator=draw)}
    last = {"scale": torch.tensor(0.5), "embedding": torch.randn(40, 5, generator=draw)}
    return matrices | vectors | last


def test_every_tensor_of_every_version_arrives_through_one_buffer(generator: Generator) -> None:
    weights = policy()
    transport = Ipc(WholeWeights(lambda: iter(weights.items())), "run-0")
    transport.connect(generator)
    for _ in range(2):
        weights["embedding"] += 1.0
        generator.weights.clear()
        transport.send(generator)
        expected = {
            name: value.bfloat16() if value.dim() > 1 else value for name, value in weights.items()
        }
        assert generator.weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(generator.weights[name], value, rtol=0, atol=0)
    transport.close()
    assert generator.updates > 4, "one bounded buffer, many times"


def test_adapters_arrive_merged_and_rounded_as_a_generator_would_merge_them(
    generator: Generator, tmp_path: Path
) -> None:
    trained = adapted(opened(save_tiny("llama", tmp_path), lora=LoRA(rank=4)))
    transport = Ipc(trained, "run-0")
    transport.connect(generator)
    transport.send(generator)
    transport.close()
    adapters = dict(adapter_tensors(trained.network))
    files = load_file(tmp_path / "model.safetensors")
    expected = dict(merged(files.items(), adapters, torch.bfloat16))
    assert generator.weights.keys() == expected.keys()
    for name, value in expected.items():
        held = value.bfloat16() if value.dim() > 1 else value
        torch.testing.assert_close(generator.weights[name], held, rtol=0, atol=0)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_buffer_lies_in_no_expandable_segment_and_all_else_does(
    generator: Generator, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "max_split_size_mb:128,expandable_segments:True"
    monkeypatch.setenv(variable, own)
    settings, at_allocation = [own], list[str]()

    def device() -> torch.device:
        at_allocation.append(settings[-1])
        return CPU

    monkeypatch.setattr(ipc, "this_device", device)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    sent = WholeWeights(lambda: iter(policy().items()))
    Ipc(sent, "run-0").connect(generator)
    assert at_allocation == [f"{own},expandable_segments:False"] and settings[-1] == own


def test_a_buffer_that_is_not_as_it_was_packed_is_refused(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = Ipc(WholeWeights(lambda: iter(policy().items())), "run-0")
    transport.connect(generator)

    def overwritten() -> SimpleNamespace:
        def synchronize() -> None:
            transport._buffer[0] ^= 1

        return SimpleNamespace(synchronize=synchronize)

    monkeypatch.setattr(torch.cuda, "current_stream", overwritten)
    with pytest.raises(ValueError, match="a checksum does not fit"):
        transport.send(generator)
    assert generator.weights == {}
