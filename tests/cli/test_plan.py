"""`lrl plan`: output, recipe and errors.

Covers lrl/planning/report.py.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import lrl
from lrl.cli.main import main
from tests.cli.conftest import Say
from tests.planning.shapes import LLAMA_8B, LLAMA_70B, QWEN_1_5B

LENGTHS = ("--lengths", "lognormal:mean=500,max=2000")
SMALL = (*LENGTHS, "--prompts", "16", "--prompt-tokens", "256")


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_1_5B))
    return str(tmp_path)


@pytest.fixture
def plan(qwen: str, say: Say) -> Callable[..., str]:
    """Runs `lrl plan` for the small policy; returns what it prints."""

    def printed(*words: str) -> str:
        status, out, error = say("plan", "--model", qwen, *SMALL, *words)
        assert status == 0, error
        return out

    return printed


def test_a_plan_prints_ranked_forecasts_and_the_bottleneck(plan: Callable[..., str]) -> None:
    printed = plan("--cluster", "8xH100")
    line = next(line for line in printed.splitlines() if line.startswith("step (s)  "))
    steps = [float(cell) for cell in line.removeprefix("step (s)").split()]
    assert len(steps) == 5 and steps[0] <= min(steps) * 1.01
    for message in ("nothing here was measured", " binds: "):
        assert message in printed


def test_a_plan_holds_the_policy_as_it_is_told_and_the_recipe_says_so(
    plan: Callable[..., str], tmp_path: Path
) -> None:
    cluster = ("--cluster", "2xRTX4090", "--lengths", "fixed:900")
    out = tmp_path / "planned.yaml"
    plan(*cluster, "--dtype", "bfloat16", "--recompute-every", "2", "--out", str(out))
    recipe = yaml.safe_load(out.read_text())
    model = recipe["model"]["init_args"]
    assert (model["dtype"], model["gradient_checkpointing"]) == ("bfloat16", 2)
    assert recipe["trainer"]["precision"] == "32-true"


@pytest.mark.parametrize(
    ("name", "config"), [("llama_8b_one_node", LLAMA_8B), ("llama_70b_four_nodes", LLAMA_70B)]
)
def test_the_recipes_for_clusters_are_those_that_lrl_plan_writes(
    name: str, config: dict[str, Any], tmp_path: Path, build: Any
) -> None:
    """But for the name of the model, and that of the run."""
    shipped = Path(lrl.__file__).parent / "recipes" / "cluster" / f"{name}.yaml"
    written, out = yaml.safe_load(shipped.read_text()), tmp_path / "planned.yaml"
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = shlex.split(re.search("Written by: lrl (.*)", shipped.read_text())[1])  # type: ignore[index]
    places = {"FOLDER": str(tmp_path), "FILE": str(out)}
    assert main([places.get(word, word) for word in words]) == 0
    planned = yaml.safe_load(out.read_text())
    planned["model"]["init_args"]["model"] = written["model"]["init_args"]["model"]
    planned["trainer"]["logger"]["init_args"]["name"] = name
    assert planned == written
    trainer, _, _ = build("--config", str(shipped))
    assert trainer.strategy.shards == trainer.num_nodes * (trainer.num_devices or 1)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--cluster", "8xTPU"], "--cluster is '8xTPU'"),
        *(
            (["--cluster", cluster], f"--cluster is '{cluster}'")
            for cluster in ("H100", "0xH100", "8x", "8.5xH100")
        ),
        *(
            (["--lengths", lengths], "--lengths is ")
            for lengths in ("normal:mean=3", "lognormal:mean=2000", "fixed:0")
        ),
        (["--lengths", "lognormal:mean=9000,max=8000"], "--lengths is "),
        (["--cluster", "1xH100"], "--cluster is '1xH100'; a plan divides two devices or more"),
        (["--base", "no_recipe"], "[Errno 2] No such file or directory: 'no_recipe'"),
        (
            ["--cluster", "2xRTX4090", "--lengths", "fixed:900"],
            "nothing fits: with one response, training takes",
        ),
    ],
)
def test_bad_input_is_one_error_with_the_setting(
    words: list[str], named: str, qwen: str, tmp_path: Path, monkeypatch: Any, say: Say
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, error = say("plan", "--model", qwen, "--cluster", "8xH100", *SMALL, *words)
    assert status == 2 and error.startswith(f"lrl: error: {named}")
    assert not out, "it is said before anything is planned"
