"""Calls that are counted in the responses of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import word_problems


def test_calls_are_counted_behind_the_problem(tmp_path: Path) -> None:
    shown = "user\nTom?\nassistant\n[f()]\ntool\n19\nassistant\n19\nuser\nAda?\nassistant\n"
    texts = [f"{shown}31", f"{shown}[f()]\ntool\n31\nassistant\n[f()]\ntool\n31\nassistant\n31"]
    folder = tmp_path / "evaluation"
    folder.mkdir()
    for step in (10, 0):
        file = folder / f"held_out-step{step:06d}.jsonl"
        file.write_text("".join(json.dumps({"response": text}) + "\n" for text in texts))
    assert word_problems.calls(tmp_path) == [(0, 1.0), (10, 1.0)]
