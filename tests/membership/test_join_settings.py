"""Which generators may join a run, decided before their start."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest

from lrl.generators.settings import ServerSettings
from lrl.membership import join
from lrl.membership.registry import JoinSpec
from tests.membership.served_run import spec_of
from tests.membership.test_run_file import ELSEWHERE

OWN = join.LocalOverrides([], {})


@pytest.mark.parametrize(
    ("spec", "own", "remedy"),
    [
        (spec_of("ipc"), OWN, "generator_devices above 0"),
        (spec_of("shared_memory", owner=ELSEWHERE), OWN, "weight_transfer: pull, or nccl"),
        (spec_of("pull", owner=ELSEWHERE), OWN, "strategy.server.host 127.0.0.1, which only its own machine reaches"),
        (spec_of("nccl", on_cpu=False), OWN, "--devices .not given.*are on GPUs"),
        (spec_of(), join.LocalOverrides([0], {}), "--devices 0: .*leave it out"),
        (
            spec_of("nccl", on_cpu=False, owner=ELSEWHERE),
            join.LocalOverrides([0], {}),
            "--host 127.0.0.1: the run is on another",
        ),
        (
            spec_of("nccl", on_cpu=False, owner=ELSEWHERE),
            join.LocalOverrides([0], {"host": "0.0.0.0"}),
            "--host 0.0.0.0",
        ),
        (
            spec_of("nccl", on_cpu=False, owner=ELSEWHERE),
            join.LocalOverrides([0], {"host": "10.0.0.7"}),
            "insecure: true",
        ),
    ],
)
def test_a_generator_that_cannot_join_is_an_error_before_its_start(
    spec: JoinSpec, own: join.LocalOverrides, remedy: str
) -> None:
    with pytest.raises(ValueError, match=remedy):
        join.settings_here("runs/1", spec, own, "http://127.0.0.1:1")


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
        join.check_environment("runs/1", spec, here)


def test_settings_come_from_the_run_and_the_endpoint_from_this_machine() -> None:
    asked = ServerSettings(max_model_len=77, dtype="float32", max_num_seqs=5, extra_args={"swap-space": 3})
    spec = replace(spec_of("nccl", on_cpu=False, owner=ELSEWHERE), settings=asdict(asked))
    found = join.settings_here("runs/1", spec, join.LocalOverrides([0], {"host": "10.0.0.7", "insecure": True}), "")
    assert found == replace(asked, host="10.0.0.7", insecure=True)
