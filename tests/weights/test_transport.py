"""Transports by their names, and which way weights travel on which hardware."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lrl.generators.settings import ServerSettings
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.system.endpoint import LOOPBACK
from lrl.weights.transport import TRANSPORTS, Machine, choose_transport, find_transport

OPEN = "10.0.0.1"
"""An address that other machines reach."""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)


@pytest.mark.parametrize(
    ("name", "on_cuda", "shares_device", "is_open", "chosen"),
    [
        ("auto", False, False, False, "shared_memory"),
        ("auto", True, True, False, "ipc"),
        ("auto", True, False, False, "nccl"),
        ("auto", False, False, True, "pull"),
        ("auto", True, True, True, "pull"),
        ("auto", True, False, True, "nccl"),
        ("shared_memory", True, True, False, "shared_memory"),
        ("shared_memory", False, False, True, "shared_memory"),
        ("pull", False, False, False, "pull"),
        ("pull", True, False, True, "pull"),
    ],
)
def test_auto_takes_what_the_hardware_has_and_reaches_other_machines_where_the_run_is_open_to_them(
    name: str, on_cuda: bool, shares_device: bool, is_open: bool, chosen: str
) -> None:
    machine = Machine(on_cuda, shares_device, host=OPEN if is_open else LOOPBACK)
    assert choose_transport(name, machine).backend == chosen


@pytest.mark.parametrize(
    ("name", "on_cuda", "shares_device", "why"),
    [
        ("rdma", True, True, "choose auto"),
        ("nccl", False, False, "which needs a CUDA GPU"),
        ("ipc", True, False, "the generator has a GPU of its own"),
        ("nccl", True, True, "the generator shares the trainer's GPU"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_the_reason(
    name: str, on_cuda: bool, shares_device: bool, why: str
) -> None:
    with pytest.raises(ValueError, match=f"strategy.weight_transfer is '{name}'.*{why}"):
        choose_transport(name, Machine(on_cuda, shares_device))


def test_ipc_is_for_one_rank() -> None:
    two_ranks = Machine(on_cuda=True, shares_device=True, ranks=2)
    with pytest.raises(ValueError, match="but 2 ranks train"):
        choose_transport("ipc", two_ranks)
    assert choose_transport("auto", two_ranks).backend == "shared_memory"


def test_servers_that_the_transport_cannot_serve_are_refused_before_they_start() -> None:
    devices = {"root_device": torch.device("cuda:0"), "parallel_devices": [torch.device("cuda:0")]}
    settings = ServerSettings(extra_args={"pipeline_parallel_size": 2})
    strategy: Any = SimpleNamespace(**devices, shares_device=False, weight_transfer="auto")
    strategy.server_settings = settings
    with pytest.raises(
        ValueError, match="extra_args sets pipeline_parallel_size to 2.*tensor_parallel_size"
    ):
        GeneratorDevices.choose_transport(strategy)
    strategy.weight_transfer = "shared_memory"
    assert GeneratorDevices.choose_transport(strategy).backend == "shared_memory"


def test_nccl_on_a_shared_gpu_needs_a_host_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "a")
    assert choose_transport("nccl", Machine(on_cuda=True, shares_device=True)).backend == "nccl"
    assert choose_transport("auto", Machine(on_cuda=True, shares_device=True)).backend == "ipc"


def test_a_generator_is_on_another_nccl_host_where_the_trainer_names_its_own() -> None:
    nccl = find_transport("nccl")
    assert nccl.server_environment(1, {}) == {}
    assert nccl.server_environment(1, {"NCCL_HOSTID": "a"}) == {"NCCL_HOSTID": "a-generator-1"}


def test_a_joining_generator_is_refused_where_the_weights_cannot_reach_it() -> None:
    refused = {
        (name, here, host)
        for name in TRANSPORTS
        for here in (True, False)
        for host in (OPEN, LOOPBACK)
        if find_transport(name).join_refusal(here, host)
    }
    assert refused == {
        ("ipc", True, OPEN),
        ("ipc", True, LOOPBACK),
        ("ipc", False, OPEN),
        ("ipc", False, LOOPBACK),
        ("shared_memory", False, OPEN),
        ("shared_memory", False, LOOPBACK),
        ("pull", False, LOOPBACK),
    }


def test_ranks_on_two_machines_need_an_address_that_both_reach() -> None:
    both = Machine(on_cuda=False, shares_device=False, ranks=2, nodes=2)
    for name in ("auto", "pull"):
        with pytest.raises(ValueError, match="set that to rank 0's address"):
            choose_transport(name, both)
    assert choose_transport("auto", both._replace(host=OPEN)).backend == "pull"


def test_every_name_has_its_transport() -> None:
    assert [find_transport(name).backend for name in TRANSPORTS] == list(TRANSPORTS)
