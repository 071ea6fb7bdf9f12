"""Transports by their names, and which way weights travel on which hardware."""

from itertools import product
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


@pytest.mark.parametrize(
    ("name", "machine", "chosen"),
    [
        ("auto", Machine(False, False), "shared_memory"),
        ("auto", Machine(True, True), "ipc"),
        ("auto", Machine(True, False), "nccl"),
        ("auto", Machine(False, False, OPEN), "pull"),
        ("auto", Machine(True, True, OPEN), "pull"),
        ("auto", Machine(True, False, OPEN), "nccl"),
        ("auto", Machine(True, True, ranks=2), "shared_memory"),
        ("auto", Machine(False, False, OPEN, ranks=2, nodes=2), "pull"),
        ("shared_memory", Machine(True, True), "shared_memory"),
        ("shared_memory", Machine(False, False, OPEN), "shared_memory"),
        ("pull", Machine(False, False), "pull"),
        ("pull", Machine(True, False, OPEN), "pull"),
    ],
)
def test_auto_takes_what_the_hardware_has_and_reaches_other_machines_where_the_run_is_open_to_them(
    name: str, machine: Machine, chosen: str
) -> None:
    assert choose_transport(name, machine).backend == chosen


@pytest.mark.parametrize(
    ("name", "machine", "why"),
    [
        ("rdma", Machine(True, True), "choose auto"),
        ("nccl", Machine(False, False), "which needs a CUDA GPU"),
        ("ipc", Machine(True, False), "the generator has a GPU of its own"),
        ("ipc", Machine(True, True, ranks=2), "but 2 ranks train"),
        ("nccl", Machine(True, True), "the generator shares the trainer's GPU"),
        ("auto", Machine(False, False, ranks=2, nodes=2), "set that to rank 0's address"),
        ("pull", Machine(False, False, ranks=2, nodes=2), "set that to rank 0's address"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_the_reason(
    name: str, machine: Machine, why: str
) -> None:
    with pytest.raises(ValueError, match=f"strategy.weight_transfer is '{name}'.*{why}"):
        choose_transport(name, machine)


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
    nccl = find_transport("nccl")
    assert nccl.server_environment(1) == {}
    monkeypatch.setenv("NCCL_HOSTID", "a")
    assert choose_transport("nccl", Machine(True, True)).backend == "nccl"
    assert nccl.server_environment(1) == {"NCCL_HOSTID": "a-generator-1"}


def test_a_joining_generator_is_refused_where_the_weights_cannot_reach_it() -> None:
    cases = set(product(TRANSPORTS, (True, False), (OPEN, LOOPBACK)))
    refused = {case for case in cases if find_transport(case[0]).join_refusal(*case[1:])}
    assert refused == {
        *(case for case in cases if case[0] == "ipc"),
        *(("shared_memory", False, host) for host in (OPEN, LOOPBACK)),
        ("pull", False, LOOPBACK),
    }
