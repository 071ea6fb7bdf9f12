"""Bad input is said in two to ten lines that name the setting, the value and the remedy, before any server starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lrl.cli import main

CASES = {
    "a misspelt key": (["--data.max_lagg", "1"], ["max_lagg"]),
    "a wrong type": (["--data.max_lag", "soon"], ["max_lag", "soon"]),
    "a negative lag": (["--data.max_lag", "-1"], ["max_lag", "-1"]),
    "an objective that is not there": (["--model.objective", "PPPO"], ["objective", "PPPO"]),
    "a rho below one": (["--model.objective.rho", "0.5"], ["rho", "0.5"]),
    "a config that is not there": (["--config", "no_such.yaml"], ["no_such.yaml"]),
    "a model that is not there": (["--model.model", "no/such-model"], ["no/such-model"]),
    "a data set that is not there": (["--data.prompts.source", "no_such.jsonl"], ["no_such.jsonl"]),
    "a column that is not there": (["--data.prompts.prompt_column", "question"], ["question", "prompt"]),
    "no device left to train": (["--trainer.devices", "1"], ["generator_devices", "devices"]),
    "two devices to train": (["--trainer.devices", "4"], ["generator_devices", "devices"]),
    "a reward that cannot be imported": (["--data.rewards", "[no_such_module:reward]"], ["no_such_module"]),
    "a group of one": (["--data.rollouts_per_group", "1"], ["rollouts_per_group", "1"]),
    "a transport without its hardware": (["--trainer.strategy.weight_transfer", "nccl"], ["nccl", "shared_memory"]),
    "a trainer flag for the module": (["--trainer.gradient_clip_val", "1"], ["gradient_clip_val", "max_grad_norm"]),
    "prompts that are too long": (["--data.max_prompt_tokens", "3"], ["max_prompt_tokens", "3"]),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_in_a_few_lines_before_a_server_starts(
    case: str,
    quickstart_policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words, named = CASES[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lrl"])
    try:
        status = main(["fit", "--config", "quickstart", "--model.model", str(quickstart_policy), *words])
    except SystemExit as end:
        status = int(end.code or 0)
    shown = [line for line in capfd.readouterr().err.splitlines() if "error" in line.lower() or line.strip()]
    message = "\n".join(shown[next(i for i, line in enumerate(shown) if "error:" in line) :])
    assert status == 2
    assert all(name in message for name in named), message
    assert len(message.splitlines()) <= 10, message
    assert "Traceback" not in message
    assert not list(tmp_path.glob("**/generator-*.log"))
