"""The transport within one GPU, as far as it goes without one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrl.weights import ipc
from lrl.weights.ipc import Ipc

ENGINES = "vllm.distributed.weight_transfer"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What vLLM's trainer engine is asked for; vLLM itself is not there."""
    found: list[dict[str, Any]] = []

    def engine(info: dict[str, Any], client: Any, source: Any) -> Any:
        found.append(info | {"sends": [name for name, _ in source]})
        return SimpleNamespace(shutdown=lambda: None)

    factory = SimpleNamespace(WeightTransferTrainerFactory=SimpleNamespace(trainer_init=engine))
    modules = {
        ENGINES: factory,
        f"{ENGINES}.ipc_engine": SimpleNamespace(IPCTrainerInitInfo=dict),
        f"{ENGINES}.base": SimpleNamespace(ParamMeta=tuple, WeightSource=object),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("numbers", "size"), [(10, 64), (100, 200)])
def test_the_buffer_holds_the_largest_tensor_on_the_wire(
    numbers: int, size: int, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "small", torch.ones(3, 1)
        yield "large", torch.ones(numbers, 1)

    monkeypatch.setattr(ipc, "BUFFER_BYTES", 64)
    server = SimpleNamespace(settings=SimpleNamespace(dtype="bfloat16"))
    control: Any = SimpleNamespace(
        taking_part=[SimpleNamespace(server=server)],
        init_weight_transfer_engine=None,
        start_weight_update=None,
        finish_weight_update=None,
    )
    transport = Ipc()
    transport.connect(control, weights, "run-0")
    transport.close()
    assert asked == [{"packed": True, "packed_buffer_size_bytes": size, "rank": 0, "sends": ["small", "large"]}]
    assert Ipc.buffer_bytes(2 * numbers) == 2 * size
