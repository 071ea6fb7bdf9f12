"""The runs of the real model: what is laid over the recipe is taken by it, and the records are drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from benchmarks import word_problems
from lrl.cli.main import main


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
