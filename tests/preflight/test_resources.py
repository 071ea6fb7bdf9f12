"""The memory of GPUs that trainer and generators share."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lrl.preflight.resources import GIB, check_gpu


@pytest.mark.parametrize(
    ("share", "trainer_gib", "shared", "named"),
    [
        (0.9, 3, False, None),
        (0.9, 3, True, "beside a generator's 9 "),
        (0.5, 3, True, None),
        (0.9, 11, False, "the GPU has 10"),
    ],
)
def test_a_gpu_that_is_too_small_is_an_error(
    share: float, trainer_gib: int, shared: bool, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(total_memory=10 * GIB)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    server = SimpleNamespace(gpu_memory_utilization=share)
    root = torch.device("cuda:0")
    strategy = SimpleNamespace(server_settings=server, root_device=root, shares_device=shared)
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        check_gpu(strategy, trainer_gib * GIB)
