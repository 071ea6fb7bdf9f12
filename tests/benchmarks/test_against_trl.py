"""When a run against TRL is scored, what a finished response is, and its table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.against_trl.__main__ import table, until_end
from benchmarks.against_trl.settings import Job, checkpoints, finish_reason
from lrl.quickstart.warmup import make_tokenizer

EOS = make_tokenizer().eos_token_id


def rows(systems: Sequence[str]) -> list[dict[str, Any]]:
    """Three seeds that end at 0.9, 0.95 and 1.0."""
    shared = {"start_s": 20.0, "trl": "1"}
    return [
        {"system": system, "step": step, "seconds": 2.0 * step, "accuracy": accuracy, **shared}
        for system in systems
        for seed in (0, 1, 2)
        for step in checkpoints(60)
        for accuracy in [0.3 + step / 60 * (0.6 + 0.05 * seed)]
    ]


def test_a_run_is_scored_before_its_first_step_at_every_tenth_and_after_its_last() -> None:
    assert checkpoints(60) == [0, 10, 20, 30, 40, 50, 60]
    assert checkpoints(4) == [0, 4]
    job = Job(steps=60, policy="p", prompts="q", folder="f")
    assert (job.checkpoint(0), job.checkpoint(10)) == (Path("p"), Path("f/step-010"))


@pytest.mark.parametrize(
    ("tokens", "answer", "reason"),
    [
        ([5, 6, EOS, 0, 0], [5, 6, EOS], "stop"),
        ([5, 6, 7], [5, 6, 7], "length"),
        ([EOS], [EOS], "stop"),
        ([], [], "length"),
    ],
)
def test_a_response_is_finished_only_by_its_end_token(
    tokens: list[int], answer: list[int], reason: str
) -> None:
    assert until_end(tokens, EOS) == answer
    assert finish_reason(answer, EOS) == reason


def test_the_table_has_a_line_for_each_measured_system_and_means_over_seeds() -> None:
    heads, rule, *lines = table(rows(["trl", "lrl-1"])).splitlines()
    assert {line.count("|") for line in (heads, rule, *lines)} == {heads.count("|")}
    assert [line.split(" | ")[0] for line in lines] == ["| TRL GRPOTrainer", "| lrl, max_lag 1"]
    cells = lines[0].strip("| ").split(" | ")
    assert cells[1:3] == ["3", "0.300"]
    assert cells[8].startswith("0.950 (0.826 to")
    assert cells[9:] == ["120", "2.00", "20"]
