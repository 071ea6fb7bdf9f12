"""The runs of the real model: what is laid over the recipe is taken by it, and the records are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import word_problems
from lrl.cli.main import main
from lrl.cli.recipes import recipes
from lrl.environments import Tools
from lrl.quickstart.calculator import calculate
from lrl.quickstart.smollm2 import TOOLS_TEMPLATE
from lrl.quickstart.word_problems import held_out
from lrl.rollouts.prompts import Prompts
from tests.chat_templates import merging_tokenizer

AGENT_SHOWS = """<|im_start|>system
Call the calculator, then answer.
calculate(expression): Works out a calculation.<|im_end|>
<|im_start|>user
Tom has 12 pens and finds 7 more. How many pens does Tom have now?<|im_end|>
<|im_start|>assistant
[calculate(expression="12 + 7")]<|im_end|>
<|im_start|>tool
19<|im_end|>
<|im_start|>assistant
Tom has 19 pens now.<|im_end|>
<|im_start|>user
{question}<|im_end|>
<|im_start|>assistant
"""
"""Seen in a run (docs/real_model.md)."""


@pytest.mark.parametrize(
    ("device", "name", "objective"),
    [("cpu", "calculator-0-lag4", "AIPO"), ("gpu", "calculator-0-lag4-PPO-short", "PPO")],
)
def test_the_recipe_takes_every_run(
    device: str, name: str, objective: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", device, "--model", "some/model", "--folder", str(tmp_path)]
    args = word_problems.make_parser().parse_args(words)
    one = word_problems.VARIATIONS[name]
    config = tmp_path / "over.yaml"
    config.write_text(yaml.safe_dump(word_problems.over(one, args)))
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "word_problems", "--config", str(config), "--print_config"])
    assert ended.value.code == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert made["data"]["init_args"]["environment"] == {"class_path": word_problems.CALCULATOR}
    assert made["data"]["init_args"]["max_lag"] == 4
    assert made["model"]["init_args"]["objective"]["class_path"] == f"lrl.objectives.{objective}"
    assert made["trainer"]["accelerator"] == device
    assert rewards_of(made) == ["lrl.rewards.GSM8K"], "it was recorded without a penalty of length"


def test_the_recipe_itself_keeps_its_rewards_in_bfloat16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "some/model", "--folder", str(tmp_path)]
    one = word_problems.VARIATIONS["recipe-2-bfloat16"]
    config = tmp_path / "over.yaml"
    over = word_problems.over(one, word_problems.make_parser().parse_args(words))
    config.write_text(yaml.safe_dump(over))
    with pytest.raises(SystemExit):
        main(["fit", "--config", "word_problems", "--config", str(config), "--print_config"])
    made = yaml.safe_load(capsys.readouterr().out)
    assert rewards_of(made) == ["lrl.rewards.GSM8K", "lrl.rewards.LengthPenalty"]
    assert made["trainer"]["precision"] == "bf16-mixed"
    assert made["trainer"]["strategy"]["init_args"]["server"]["dtype"] == "bfloat16"
    recipe = yaml.safe_load(recipes()["word_problems"].read_text())
    assert made["trainer"]["max_steps"] == recipe["trainer"]["max_steps"]
    assert made["seed_everything"] == 2


def rewards_of(made: dict[str, Any]) -> list[str]:
    return [one["class_path"] for one in made["data"]["init_args"]["rewards"]]


def test_lrls_tools_show_the_policy_what_the_agent_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = word_problems.make_parser().parse_args(["--folder", str(tmp_path)])
    config = tmp_path / "over.yaml"
    config.write_text(yaml.safe_dump(word_problems.over(word_problems.VARIATIONS["tools-0"], args)))
    with pytest.raises(SystemExit):
        main(["fit", "--config", "agent", "--config", str(config), "--print_config"])
    made = yaml.safe_load(capsys.readouterr().out)
    environment = made["data"]["init_args"]["environment"]
    assert environment["class_path"] == "lrl.environments.Tools"
    (evaluation,) = (
        one for one in made["trainer"]["callbacks"] if one["class_path"].endswith(".Evaluation")
    )
    given = evaluation["init_args"]["prompts"]["init_args"]
    tokenizer = merging_tokenizer(TOOLS_TEMPLATE)
    prompts = Prompts(given["source"], prompt_column=given["prompt_column"], shuffle=False)
    prompts.load(tokenizer, 1000, tools=Tools([calculate]).tools)
    shown = tokenizer.decode(prompts[0].token_ids)
    assert shown == AGENT_SHOWS.format(question=held_out()[0]["question"])
    assert prompts[0].columns["answer"] == held_out()[0]["answer"]


def test_calls_are_counted_behind_the_problem(tmp_path: Path) -> None:
    shown = "user\nTom?\nassistant\n[f()]\ntool\n19\nassistant\n19\nuser\nAda?\nassistant\n"
    texts = [f"{shown}31", f"{shown}[f()]\ntool\n31\nassistant\n[f()]\ntool\n31\nassistant\n31"]
    folder = tmp_path / "evaluation"
    folder.mkdir()
    for step in (10, 0):
        file = folder / f"held_out-step{step:06d}.jsonl"
        file.write_text("".join(json.dumps({"response": text}) + "\n" for text in texts))
    assert word_problems.calls(tmp_path) == [(0, 1.0), (10, 1.0)]


def test_the_records_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.png"
    assert word_problems.main(["--device", "gpu", "--plot-only", "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 0
    assert "| plain-0 | 60 | 0.512 (0.450 to 0.575) |" in capsys.readouterr().out
