"""The shipped recipes: they build, settings change what they say, and they run with tiny policies
for big ones.

The data sets are folders that lie where the hub's names point, so the recipes are run as they are
written.

Covers lrl/cli/lightning.py, recipes.py.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from lrl.callbacks import Evaluation
from lrl.callbacks.base import find_all
from lrl.cli.lightning import LrlCLI
from lrl.cli.main import main
from lrl.cli.recipes import recipes
from lrl.routing.dispatch import LeastLoaded
from lrl.strategies.generator_devices import GeneratorDevices
from tests.data_rows import gsm8k_rows, math_rows
from tests.lent_server import LentServer
from tests.tiny_policies import byte_tokenizer, tiny_qwen2

PROBLEMS = 8
ON_CPU = ["--trainer.accelerator", "cpu"]
SMALL = [
    *ON_CPU,
    *("--trainer.max_steps", "3"),
    *("--trainer.strategy.server.max_num_seqs", "16"),
    *("--trainer.strategy.server.dtype", "float32"),
    *("--data.groups_per_step", "2"),
    *("--data.rollouts_per_group", "2"),
    *("--data.max_response_tokens", "8"),
    *("--data.reward_workers", "1"),
]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Builds what `lrl fit` would run: gives the trainer, and what its `fit` was called with."""
    calls: list[tuple[L.Trainer, dict[str, Any]]] = []

    @functools.wraps(L.Trainer.fit)
    def fit(self: L.Trainer, **arguments: Any) -> None:
        calls.append((self, arguments))

    def run(*words: str) -> tuple[L.Trainer, Any, Any]:
        assert main(["fit", *words, *ON_CPU]) == 0
        trainer, arguments = calls.pop()
        return trainer, arguments["model"], arguments["datamodule"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(L.Trainer, "fit", fit)
    monkeypatch.setattr(sys, "argv", ["lrl"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it; so it is taken back
    return run


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the hub's names are folders, each with a few short rows."""
    folder = tmp_path_factory.mktemp("hub")
    gsm8k = [row for row in gsm8k_rows(100) if len(row["question"]) < 250]
    math = [row for row in math_rows(100) if len(row["problem"]) < 250]
    columns = ("problem", "solution")
    write_split(folder / "openai/gsm8k", "main", "train", gsm8k[PROBLEMS : 4 * PROBLEMS])
    write_split(folder / "openai/gsm8k", "main", "test", gsm8k[:PROBLEMS])
    write_split(folder / "HuggingFaceH4/MATH-500", "default", "test", math[:PROBLEMS])
    rows = [{name: row[name] for name in columns} for row in math[PROBLEMS : 4 * PROBLEMS]]
    write_split(folder / "DigitalLearningGmbH/MATH-lighteval", "default", "train", rows)
    return folder


def write_split(folder: Path, subset: str, split: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / f"{split}.jsonl", rows)
    files = [{"split": path.stem, "path": path.name} for path in sorted(folder.glob("*.jsonl"))]
    card = yaml.safe_dump({"configs": [{"config_name": subset, "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{card}---\n")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lrl(folder: Path, *words: str | Path) -> str:
    """Runs the installed command in `folder`; returns what it printed."""
    command = [str(Path(sys.executable).with_name("lrl")), *map(str, words)]
    environment = os.environ | {
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [*sorted(recipes()), str(recipes()["quickstart"])])
def test_every_recipe_builds_by_its_name_and_one_by_its_path(build: Any, name: str) -> None:
    trainer, _, _ = build("--config", name)
    assert trainer.max_steps > 0 and find_all(trainer, Evaluation)


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_has_its_expected_result_beside_it(name: str) -> None:
    page = recipes()[name].with_name("README.md").read_text()
    assert f"## {name}\n" in page


def test_settings_on_the_command_line_change_the_named_objects(build: Any) -> None:
    changes = ["--trainer.max_steps", "20", "--data.max_lag", "0"]
    trainer, policy, data = build(
        "--config", "math", *changes, "--model.objective", "AIPO", "--model.objective.rho", "2"
    )
    assert (trainer.max_steps, data.max_lag, policy.objective.rho) == (20, 0, 2.0)


def test_a_module_that_saves_its_settings_gets_those_of_lightnings_command_line(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = LrlCLI._dump_config, []

    def both(cli: LrlCLI) -> None:
        own(cli)
        found = cli.__dict__.pop("config_dump")
        LightningCLI._dump_config(cli)
        seen.append(found == cli.config_dump)

    monkeypatch.setattr(LrlCLI, "_dump_config", both)
    build("--config", "gsm8k", "--model.objective", "AIPO")
    assert seen and all(seen)


def test_a_rule_of_dispatch_is_a_class_with_its_settings(build: Any, tmp_path: Path) -> None:
    config = tmp_path / "tails.yaml"
    rule = {
        "class_path": "lrl.routing.dispatch.SkewnessAware",
        "init_args": {"combine": "sum", "long_tail": 0.1},
    }
    rule["init_args"]["decode_latency"] = {"step_ms": 5.0}
    config.write_text(yaml.safe_dump({"data": {"init_args": {"dispatch": rule}}}))
    migration = ("--data.migration", "Migration", "--data.migration.prefill_ms", "0.5")
    _, _, data = build("--config", "quickstart", "--config", str(config), *migration)
    assert (
        data.dispatch.combine,
        data.dispatch.long_tail,
        data.dispatch.decode_latency.step_ms,
    ) == ("sum", 0.1, 5.0)
    assert data.length_predictor is not None and data.migration.prefill_ms == 0.5

    lengths = (
        "--data.length_predictor",
        "LengthPredictor",
        "--data.length_predictor.seen_prompts",
        "9",
    )
    _, _, data = build("--config", "quickstart", "--data.dispatch", "LeastLoaded", *lengths)
    assert (
        isinstance(data.dispatch, LeastLoaded)
        and data.length_predictor.seen_prompts == 9
        and data.migration is None
    )


@pytest.mark.parametrize(("name", "rows"), [("gsm8k", gsm8k_rows(3)), ("math", math_rows(3))])
def test_a_file_takes_the_place_of_a_recipes_data_set(
    build: Any, name: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    _, _, data = build("--config", name, "--data.prompts.source", str(file))
    data.prompts.load(byte_tokenizer(), 4096)
    assert len(data.prompts) == 3 and data.prompts.name == name
    question = rows[0].get("question") or rows[0]["problem"]
    assert next(iter(data.prompts)).text.startswith(question)
    assert next(iter(data.prompts)).text.endswith("put your final answer in \\boxed{}.")


def test_a_recipe_runs_with_a_tiny_policy(hub: Path, tmp_path: Path) -> None:
    policy = tiny_qwen2(tmp_path / "policy")
    lrl(
        hub,
        "fit",
        "--config",
        "gsm8k",
        "--model.model",
        policy,
        *SMALL,
        "--trainer.logger.save_dir",
        tmp_path,
    )
    folder = tmp_path / "gsm8k" / "version_0"

    board = EventAccumulator(str(folder)).Reload()
    lags = [event.value for event in board.Scalars("policy/lag_max")]
    assert len(lags) == 3 and max(lags) <= 1
    tags = set(board.Tags()["scalars"])
    assert {"policy/loss", "reward/mean", "time/step", "fleet/alive"} <= tags
    assert {tag.split("/")[1] for tag in tags if tag.startswith("eval/")} == {"gsm8k", "math500"}
    assert any(tag.startswith("eval/math500/level/") for tag in tags)

    AutoModelForCausalLM.from_pretrained(folder / "policy")
    assert AutoTokenizer.from_pretrained(folder / "policy").chat_template


@pytest.fixture
def validate(
    lent_server: LentServer,
    hub: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """Runs `lrl validate` in this process, beside the hub and with a lent server; returns what it
    printed."""

    def borrow(strategy: Any, *_: Any) -> list[LentServer]:
        strategy.run_id = lent_server.run_id
        return [lent_server]

    def run(*words: str | Path) -> str:
        capsys.readouterr()
        assert main(["validate", *map(str, words)]) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(GeneratorDevices, "make_servers", borrow)
    monkeypatch.setattr(sys, "argv", ["lrl"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it; so it is taken back
    monkeypatch.chdir(hub)
    return run


def test_validate_prints_the_report_and_writes_every_response(
    validate: Callable[..., str], policy_folder: Path, tmp_path: Path
) -> None:
    prompts = {"class_path": "lrl.Prompts", "init_args": {"source": "math500", "split": "test"}}
    sampled = {"prompts": prompts, "samples": 4, "temperature": 1.0}
    callbacks = [
        {"class_path": "lrl.callbacks.WeightSync"},
        {"class_path": "lrl.callbacks.Evaluation", "init_args": sampled},
    ]
    four_responses = tmp_path / "four_responses.yaml"
    four_responses.write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    printed = validate(
        *(
            "--config",
            recipes()["math"],
            "--config",
            four_responses,
            "--model.model",
            policy_folder,
        ),
        *(*SMALL, "--trainer.logger.save_dir", tmp_path),
    )
    assert f"math500: {PROBLEMS} problems x 4 responses, sampled, version 0" in printed
    assert "95 % interval" in printed and "pass@4" in printed

    file = tmp_path / "math/version_0/evaluation/math500-step000000.jsonl"
    assert str(file) in printed
    responses = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(answer["id"] for answer in responses) == sorted(list(range(PROBLEMS)) * 4)
    assert all(
        answer["reward"] in (0, 1) and answer["response"] is not None for answer in responses
    )


def test_word_problems_are_evaluated_kind_by_kind(
    validate: Callable[..., str], policy_folder: Path, tmp_path: Path
) -> None:
    printed = validate(
        *("--config", "word_problems", "--model.model", policy_folder),
        *(*SMALL, "--trainer.logger.save_dir", tmp_path),
    )
    assert "held_out: 240 problems x 1 responses, greedy, version 0" in printed
    by_kind = printed.partition("by kind\n")[2]
    assert re.findall(r"(\w+) +\d\.\d+ +\(n = 80\)", by_kind) == ["difference", "product", "sum"]
