"""Which way weights travel on which hardware."""

import pytest

from lrl.weights import choose_transport


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)


@pytest.mark.parametrize(
    ("name", "on_cuda", "shares_device", "chosen"),
    [
        ("auto", False, False, "shared_memory"),
        ("auto", True, True, "ipc"),
        ("auto", True, False, "nccl"),
        ("shared_memory", True, True, "shared_memory"),
    ],
)
def test_auto_takes_what_the_hardware_has(name: str, on_cuda: bool, shares_device: bool, chosen: str) -> None:
    assert choose_transport(name, on_cuda=on_cuda, shares_device=shares_device) == chosen


@pytest.mark.parametrize(
    ("name", "on_cuda", "shares_device", "remedy"),
    [
        ("rdma", True, True, "choose auto"),
        ("nccl", False, False, "`shared_memory` works"),
        ("ipc", True, False, "`nccl` works"),
        ("nccl", True, True, "`ipc` works"),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(name: str, on_cuda: bool, shares_device: bool, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"strategy.weight_transfer is '{name}'.*{remedy}"):
        choose_transport(name, on_cuda=on_cuda, shares_device=shares_device)


def test_nccl_on_a_shared_gpu_needs_a_host_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "a")
    assert choose_transport("nccl", on_cuda=True, shares_device=True) == "nccl"
    assert choose_transport("auto", on_cuda=True, shares_device=True) == "ipc"
    with pytest.raises(ValueError, match="`nccl` works"):
        choose_transport("ipc", on_cuda=True, shares_device=False)
