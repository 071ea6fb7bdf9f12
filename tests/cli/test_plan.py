"""`lrl plan`: output, recipe, errors and imports.

Covers lrl/planning/report.py.
"""

from __future__ import annotations

import functools
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from rich.console import Console
from rich.table import Table

import lrl
from lrl.cli.main import main
from lrl.planning.report import print_whole
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


FILES = {
    "no_recipe": "model: {}",
    "turns": "{model: {}, data: {init_args: {environment: a.B, max_turns: 0}}, trainer: {}}",
}


def test_a_plan_prints_ranked_forecasts_the_bottleneck_and_the_price(
    plan: Callable[..., str],
) -> None:
    printed = plan("--cluster", "8xH100", "--price", "2.5")
    steps = [float(cell) for cell in row(printed, "step (s)")]
    assert len(steps) == len(row(printed, "price of a step")) == 5
    assert steps[0] <= min(steps) * 1.01
    assert row(printed, "today's lrl") == ["runs it"] * 4 + ["cannot yet"]
    for message in ("nothing here was measured", " binds: ", "8 in turn"):
        assert message in printed


def test_a_plan_with_an_environment_has_its_turns_and_the_recipe_their_limits(
    plan: Callable[..., str], tmp_path: Path
) -> None:
    turns = ["--turns", "lognormal:mean=2,max=5", "--tool-ms", "fixed:30000"]
    episodes = [*turns, "--base", "calculator", "--observation-tokens", "8"]
    out = tmp_path / "planned.yaml"
    printed = " ".join(plan("--cluster", "2xH100", *episodes, "--out", str(out)).split())
    assert "in episodes of 2 turns in the mean and 5 at most" in printed
    assert "At most 256 episodes are in flight (max_lag + 1 = 2 times 16 prompts" in printed
    data = yaml.safe_load(out.read_text())["data"]["init_args"]
    assert data["max_turns"] == 5 and data["max_turn_tokens"] == 2000
    assert 2000 < data["max_response_tokens"] <= 5 * 2000 + 4 * 8


def test_a_plan_imports_neither_torch_nor_vllm(qwen: str) -> None:
    code = (
        "import sys; from lrl.cli.main import main\n"
        f"assert main(['plan', '--model', {qwen!r}, '--cluster', '8xH100', *{SMALL!r}]) == 0\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'lightning'} & sys.modules.keys()))"
    )
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Returns the trainer that `lrl fit` makes of a recipe, on the CPU, and what it would fit."""
    calls: list[tuple[L.Trainer, dict[str, Any]]] = []

    @functools.wraps(L.Trainer.fit)
    def fit(self: L.Trainer, **arguments: Any) -> None:
        calls.append((self, arguments))

    def built(recipe: str) -> tuple[L.Trainer, dict[str, Any]]:
        assert main(["fit", "--config", recipe, "--trainer.accelerator", "cpu"]) == 0
        return calls.pop()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(L.Trainer, "fit", fit)
    monkeypatch.setattr(sys, "argv", ["lrl"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it; so it is taken back
    return built


def test_lrl_fit_builds_the_written_recipe(plan: Callable[..., str], build: Any) -> None:
    plan("--cluster", "8xH100", "--out", "planned.yaml")
    trainer, arguments = build("planned.yaml")
    data, strategy = arguments["datamodule"], trainer.strategy
    assert (data.groups_per_step, data.sampling.n) == (16, 8)
    assert (data.max_prompt_tokens, data.sampling.max_tokens) == (256, 2000)
    kept, server = len(strategy.generator_devices), strategy.server_settings  # type: ignore[attr-defined]
    assert 1 < 1 + kept <= 8 and kept % server.tensor_parallel_size == 0
    assert data.max_lag == 1 and arguments["model"].gradient_checkpointing


def test_a_plan_holds_the_policy_as_it_is_told_and_the_recipe_says_so(
    plan: Callable[..., str], tmp_path: Path
) -> None:
    cluster = ("--cluster", "2xRTX4090", "--lengths", "fixed:900")
    assert "lrl can run none of these plans today: with one response" in plan(*cluster)
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
    trainer, _ = build(str(shipped))
    assert trainer.strategy.shards == trainer.num_nodes * (trainer.num_devices or 1)


def test_a_simulated_plan_writes_the_fastest_dispatch_policy(
    plan: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest = {"class_path": "lrl.routing.dispatch.LeastTokens"}
    monkeypatch.setattr("lrl.planning.simulated.best_dispatch", lambda outcomes: fastest)
    out = tmp_path / "planned.yaml"
    printed = plan("--cluster", "2xH100", "--simulate", "1", "--out", str(out))
    for message in ("Simulated", "LeastLoaded", "LeastTokens", "more", "write"):
        assert message in printed
    assert yaml.safe_load(out.read_text())["data"]["init_args"]["dispatch"] == fastest


def test_a_plan_that_lrl_cannot_run_is_printed_and_not_written(tmp_path: Path, say: Say) -> None:
    config, out = tmp_path / "config.json", tmp_path / "planned.yaml"
    config.write_text(json.dumps(LLAMA_8B))
    words = ["plan", "--model", str(config), "--cluster", "2xH100", *SMALL]
    status, printed, error = say(*words, "--out", out)
    assert status == 2 and "cannot yet" in printed and "runs it" not in printed
    assert "nothing was written" in error and not out.exists()
    for why in (printed.split("Forecasts")[0], error):  # said before the table, too
        assert "lrl can run none of these plans today" in why and "takes 13" in why


def row(printed: str, name: str) -> list[str]:
    """Returns the cells of a row of the first table."""
    line = next(line for line in printed.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.split("│")[2:-1]]


def test_a_table_wider_than_the_terminal_loses_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=20)
    table = Table("name", "what is found")
    table.add_row("transport", "shared_memory, ipc, nccl")
    print_whole(console, table)
    assert "│ transport │ shared_memory, ipc, nccl │" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--cluster", "8xTPU"], "--cluster is '8xTPU'"),
        (["--simulate", "2", "--generators", "8xH20"], "--generators: --simulate and --out"),
        (["--cluster", "1xH100", "--lengths", "fixed:200000"], "nothing fits"),
        (["--base", "no_recipe"], "--base is 'no_recipe'"),
        (["--base", "calculator"], "--turns is missing"),
        (["--base", "turns"], "data.max_turns of --base is 'fixed:0'"),
        (["--tool-ms", "fixed:9"], "--turns is missing"),
        (["--compare", "no/where"], "[Errno 2] No such file or directory: 'no/where/timeline"),
    ],
)
def test_bad_input_is_one_error_with_the_setting(
    words: list[str], named: str, qwen: str, tmp_path: Path, monkeypatch: Any, say: Say
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    status, out, error = say("plan", "--model", qwen, "--cluster", "8xH100", *SMALL, *words)
    assert status == 2 and error.startswith(f"lrl: error: {named}")
    assert not out, "it is said before anything is planned"


def test_on_one_device_both_sides_share_its_memory(
    plan: Callable[..., str], tmp_path: Path
) -> None:
    plan("--cluster", "1xH100", "--out", str(tmp_path / "planned.yaml"))
    planned = yaml.safe_load((tmp_path / "planned.yaml").read_text())
    strategy = planned["trainer"]["strategy"]["init_args"]
    assert planned["trainer"]["devices"] == 1 and strategy["generator_devices"] == 0
    # The trainer's state is beside it.
    assert 0 < strategy["server"]["gpu_memory_utilization"] < 0.7
    assert planned["data"]["init_args"]["max_lag"] == 0


def test_generators_may_be_in_a_second_cluster(plan: Callable[..., str]) -> None:
    words = ["--cluster", "16xH800", "--generators", "32xH20", "--max-lag", "0"]
    slow, fast = (plan(*words, "--link", link) for link in ("0.1", "1000"))
    assert row(slow, "step (s)") != row(fast, "step (s)")
    assert set(row(slow, "today's lrl")) == {"cannot yet"}


def test_too_small_a_number_is_refused(say: Say) -> None:
    for setting in ("--prompts", "--link"):
        assert f"argument {setting}: 0 is below" in say("plan", f"{setting}=0")[2]
