"""Which members may join a run, decided before their start.

Covers lrl/members/join_spec.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import pytest

from lrl.generators.settings import ServerSettings
from lrl.members.join_session import LocalOverrides
from lrl.members.join_spec import JoinSpec
from lrl.members.joining_generator import check_environment, generator_settings
from tests.members.served_run import spec_of
from tests.members.test_run_file import ELSEWHERE


@pytest.mark.parametrize(
    ("spec", "devices", "endpoint", "remedy"),
    [
        (spec_of("ipc"), [], {}, "generator_devices above 0"),
        (spec_of("shared_memory", owner=ELSEWHERE), [], {}, "weight_transfer: pull, or nccl"),
        (
            spec_of("pull", owner=ELSEWHERE),
            [],
            {},
            "strategy.server.host 127.0.0.1, which only its own machine reaches",
        ),
        (spec_of("nccl", on_cpu=False), [], {}, "--devices .not given.*are on GPUs"),
        (spec_of(), [0], {}, "--devices 0: .*leave it out"),
        (
            spec_of("nccl", on_cpu=False, owner=ELSEWHERE),
            [0],
            {},
            "--host 127.0.0.1: the run is on another",
        ),
        (
            spec_of("nccl", on_cpu=False, owner=ELSEWHERE),
            [0],
            {"host": "0.0.0.0"},
            "--host 0.0.0.0",
        ),
        (
            spec_of("nccl", on_cpu=False, owner=ELSEWHERE),
            [0],
            {"host": "10.0.0.7"},
            "insecure: true",
        ),
    ],
)
def test_a_generator_that_cannot_join_is_an_error_before_its_start(
    spec: JoinSpec, devices: list[int], endpoint: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ValueError, match=remedy):
        generator_settings(
            "runs/1", spec, LocalOverrides(devices, endpoint=endpoint), "http://127.0.0.1:1"
        )


@pytest.mark.parametrize(
    ("of_run", "here", "named"),
    [
        ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}, "NCCL_ALGO is 'Tree' here and is 'Ring' in"),
        ({}, {"NCCL_ALGO": "Tree"}, "NCCL_ALGO is 'Tree' here and is not set in"),
        ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth1"}, None),
        ({"NCCL_ALGO": "Ring"}, {}, None),
    ],
)
def test_nccl_settings_that_contradict_the_runs_are_an_error_with_both_values(
    of_run: dict[str, str], here: dict[str, str], named: str | None
) -> None:
    spec = spec_of("nccl", on_cpu=False, environment=of_run)
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        check_environment("runs/1", spec, here)


def test_settings_come_from_the_run_and_the_endpoint_from_this_machine() -> None:
    asked = ServerSettings(
        max_model_len=77, dtype="float32", max_num_seqs=5, extra_args={"swap-space": 3}
    )
    spec = replace(spec_of("nccl", on_cpu=False, owner=ELSEWHERE), settings=asdict(asked))
    found = spec.settings_here({"host": "10.0.0.7", "insecure": True}, "")
    assert found == replace(asked, host="10.0.0.7", insecure=True)
