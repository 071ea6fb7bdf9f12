"""Which way weights travel on which hardware."""

import pytest

from lrl.weights import TRANSPORTS, Machine, choose_transport, find_transport


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
    assert choose_transport(name, Machine(on_cuda, shares_device)).backend == chosen


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
        choose_transport(name, Machine(on_cuda, shares_device))


def test_nccl_on_a_shared_gpu_needs_a_host_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "a")
    assert choose_transport("nccl", Machine(on_cuda=True, shares_device=True)).backend == "nccl"
    assert choose_transport("auto", Machine(on_cuda=True, shares_device=True)).backend == "ipc"
    with pytest.raises(ValueError, match="`nccl` works"):
        choose_transport("ipc", Machine(on_cuda=True, shares_device=False))


def test_a_generator_is_on_another_nccl_host_where_the_trainer_names_its_own() -> None:
    nccl = find_transport("nccl")
    assert nccl.server_environment(1, {}) == {}
    assert nccl.server_environment(1, {"NCCL_HOSTID": "a"}) == {"NCCL_HOSTID": "a-generator-1"}


def test_only_cuda_handles_may_arrive_pickled() -> None:
    allowed = {name for name in TRANSPORTS if find_transport(name).server_environment(0, {})}
    assert allowed == {"ipc"}


def test_a_joining_generator_is_refused_where_the_weights_cannot_reach_it() -> None:
    refused = {(name, here): find_transport(name).join_refusal(here) for name in TRANSPORTS for here in (True, False)}
    assert {case for case, why in refused.items() if why} == {("ipc", True), ("ipc", False), ("shared_memory", False)}
