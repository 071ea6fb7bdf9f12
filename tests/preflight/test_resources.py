"""The memory of GPUs that trainer, generators and ranker share."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lrl.preflight import resources


@pytest.mark.parametrize(
    ("share", "trainer_gib", "alone", "ranker_on", "named"),
    [
        (0.9, 3, True, None, None),
        (0.9, 3, False, None, "beside the generator's 9.0"),
        (0.5, 3, False, None, None),
        (0.9, 11, True, None, "the GPU has 10.0"),
        (0.1, 3, True, None, "gpu_memory_utilization or tensor_parallel_size"),
        (
            0.5,
            3,
            False,
            "cuda:0",
            "take 3.0 GiB, data.length_predictor.ranker 4.0 beside the generator's 5.0",
        ),
        (0.5, 3, False, "cpu", None),
        (0.5, 3, True, "cuda:1", None),
        (
            0.9,
            3,
            True,
            "cuda:1",
            "data.length_predictor.ranker takes 4.0 GiB of cuda:1, where a generator has 9.0",
        ),
    ],
)
def test_a_gpu_that_is_too_small_is_an_error(
    share: float,
    trainer_gib: int,
    alone: bool,
    ranker_on: str | None,
    named: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda device: SimpleNamespace(total_memory=10 * resources.GIB),
    )
    server = SimpleNamespace(gpu_memory_utilization=share, tensor_parallel_size=1)
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    devices = {
        "root_device": first,
        "parallel_devices": [first],
        "generator_devices": [second] * alone,
    }
    devices["shares_device"] = not alone
    strategy = SimpleNamespace(server_settings=server, **devices)
    beside = {torch.device(ranker_on): 4 * resources.GIB} if ranker_on else {}
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        resources.check_gpus(strategy, trainer_gib * resources.GIB, 2 * resources.GIB, beside)


@pytest.mark.parametrize(
    ("share", "buffers_gib", "named"),
    [
        (0.9, 1, None),
        (
            0.9,
            2,
            "buffers of strategy.weight_transfer take 2.0 GiB of cuda:1, where a generator has "
            "9.0 of 10.0",
        ),
        (0.9, 8, "take 3.0 GiB, buffers of strategy.weight_transfer 8.0, and the GPU has 10.0"),
    ],
)
def test_the_buffers_of_a_transfer_are_counted_beside_the_generators_share(
    share: float, buffers_gib: int, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda device: SimpleNamespace(total_memory=10 * resources.GIB),
    )
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    devices = {"root_device": first, "parallel_devices": [first], "generator_devices": [second]}
    devices["shares_device"] = False
    server = SimpleNamespace(gpu_memory_utilization=share, tensor_parallel_size=1)
    strategy = SimpleNamespace(server_settings=server, **devices)
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        resources.check_gpus(
            strategy, 3 * resources.GIB, resources.GIB, {}, buffers_gib * resources.GIB
        )
