"""The benchmark of a fleet that grows and shrinks, as far as it goes without a run: its run's
settings and its sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.tensorboard import SummaryWriter

from benchmarks import elastic

SETTINGS = elastic.make_parser().parse_args(["--capacity", "3"])


def write(folder: Path, alive: list[int]) -> None:
    """A run's figures, step by step."""
    with SummaryWriter(str(folder)) as writer:
        for step, count in enumerate(alive):
            for tag in elastic.TAGS:
                writer.add_scalar(tag, count if tag == "fleet/alive" else float(step + 1), step)


class Ended(elastic.Run):
    """A run that is there only by what it wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events = None

    def wait_for(self, condition: object, what: str) -> None:
        assert callable(condition) and condition(), what


def test_the_run_writes_few_responses_at_once_and_has_no_further_callbacks(tmp_path: Path) -> None:
    recipe = yaml.safe_load(elastic.config_of(SETTINGS, tmp_path).read_text())
    assert recipe["trainer"]["strategy"]["init_args"]["server"]["max_num_seqs"] == 3
    names = [
        callback["class_path"].rpartition(".")[2] for callback in recipe["trainer"]["callbacks"]
    ]
    assert names == list(elastic.CALLBACKS)


def test_the_steps_of_a_phase_are_weighted_by_their_seconds(tmp_path: Path) -> None:
    write(tmp_path, [1, 1, 1])
    steps = Ended(tmp_path).series()
    assert elastic.phase(steps) == {
        "tokens_per_s": pytest.approx((1 + 4 + 9) / 6, rel=1e-4),
        "step_s": 2.0,
        "wait": 1.0,
    }


def test_a_count_that_the_run_has_not_logged_is_zero(tmp_path: Path) -> None:
    write(tmp_path, [1, 1, 1])
    assert [step[elastic.COUNT] for step in Ended(tmp_path).series()] == [0, 0, 0]
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar(elastic.COUNT, 5, 2)
    assert [step[elastic.COUNT] for step in Ended(tmp_path).series()] == [0, 0, 5]


def test_steps_with_another_number_of_generators_are_not_counted(tmp_path: Path) -> None:
    write(tmp_path, [1, 1, 2])
    run = Ended(tmp_path)
    shown = iter([1, 1, 3, 3])
    whole = run.series()
    run.series = lambda: whole[: next(shown)]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="Not all of steps 1 to 2 had 1 generators"):
        run.train_on(2, alive=1)


def test_a_lost_group_shows(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    ledger = {"done_through": 7, "done_ahead": [9, 11], "given_up": {3: 1}}
    checkpoint = {"global_step": 5, "RolloutDataModule": {"ledger": ledger}}
    torch.save(checkpoint, tmp_path / "checkpoints" / "last-step=5.ckpt")
    assert elastic.trained(tmp_path, groups=2) == {"trained": 9, "expected": 10, "given_up": 1}
