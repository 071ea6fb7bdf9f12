"""What lrl trains on a GPU is what it trains on the CPU, and a GPU would not refuse it.

A GPU is played by CPU memory (`tests.standin_cuda`), in one process for all cases.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lrl import objectives
from tests.standin_cuda.cases import FAULTS, cases

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

NAMES = list(cases("policy"))
DEADLINE_S = 900
TOLERANCE = {"rel": 1e-4, "abs": 1e-6}
TOLERANCE_16_BITS = {"rel": 1e-2, "abs": 2e-4}
"""The CPU's and CUDA's autocast have other lists of operations, and AdamW adds up in another
order."""

WAITS_A_MICRO_BATCH, WAITS_A_STEP = 0, 1
"""Blocking copies to the GPU included."""
MORE_WAITS = {
    "bf16-mixed, flash_attention_2": 4,
    "bf16-mixed, lora, critic with a model, reference": 8,
    "CISPO, turns, turn critic, bfloat16, eager, by a number, abort on mismatch": 4,
    "GSPO, copies, by sequence": 4,
    "DecoupledPPO, lora, its base as reference": 4,
    "REINFORCE, reference in the reward, refreshed": 4,
    "TBA, reference": 4,
    "IcePop, turns, turn critic with a model, teacher": 16,
    "TOPR, resumed, lora, critic": 4,
}
"""Beyond that in a step: one a micro-batch where transformers looks whether rows of copies are
packed, and one for each read of what a reference or critic computes ahead. Fewer are better: lower
the number then."""
REFUSALS = {
    "loss on the CPU": "RuntimeError: Expected all tensors to be on the same device",
    "noise from the CPU": "RuntimeError: Expected a 'cuda' device type for generator",
    "GPU to numpy": "TypeError: can't convert cuda:0 device type tensor to numpy",
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All rows by name."""
    out: Path = tmp_path_factory.mktemp("standin") / "rows.jsonl"
    command = [sys.executable, "-m", "tests.standin_cuda", "--out", str(out)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return {(row := json.loads(line))["row"]: row for line in out.read_text().splitlines()}


def test_every_objective_is_played() -> None:
    played = {type(make().get("objective")).__name__ for make in cases("policy").values()}
    every = {
        name
        for name in objectives.__all__
        if isinstance(one := getattr(objectives, name), type)
        and issubclass(one, objectives.Objective)
        and one is not objectives.Objective
    }
    assert every <= played


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_trains_the_cpus_policy(played: dict[str, dict[str, Any]], name: str) -> None:
    row = played[name]
    in_16_bits = "16" in name
    tolerance = TOLERANCE_16_BITS if in_16_bits else TOLERANCE
    assert row.get("error") is None
    assert row["gpu"] == pytest.approx(row["cpu"], **tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_the_host_waits_for_a_gpu_no_more_often_than_is_written_down(
    played: dict[str, dict[str, Any]], name: str
) -> None:
    row = played[name]
    plain = WAITS_A_MICRO_BATCH * row["micro_batches"] + WAITS_A_STEP
    assert row["micro_batches"] > 3
    assert sum(row["waits"].values()) == plain + MORE_WAITS.get(name, 0), row["waits"]
    # Weights are staged through pinned memory: the host waits for events alone, no waits here.
    assert row["staging_waits"] == {}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_a_gpu_refuses_is_found(played: dict[str, dict[str, Any]], name: str) -> None:
    assert played[name]["error"].startswith(REFUSALS[name])
