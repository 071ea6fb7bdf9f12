"""What a chaos benchmark calls lost, twice or growing, and which faults it plans."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from benchmarks.chaos import faults, trainer
from benchmarks.chaos.journal import surviving, trained

PROMPTS = 4


def step(number: int, launched: int, indices: list[int]) -> dict[str, Any]:
    # Another order in each epoch.
    prompts = [(index * 3 + index // PROMPTS) % PROMPTS for index in indices]
    return {"step": number, "launch": launched, "indices": indices, "prompts": prompts}


def two_epochs(launched: int = 0) -> list[dict[str, Any]]:
    return [step(number, launched, [2 * number, 2 * number + 1]) for number in range(4)]


END = {"done_through": 8, "done_ahead": [], "open": [], "skipped": []}


# ---- what counts as lost


def test_a_step_counts_for_the_last_launch_that_trained_it() -> None:
    first, second = two_epochs(0), two_epochs(1)
    second[1]["indices"], second[2]["indices"] = [3, 4], [2, 5]
    lineage = surviving([*first[:3], *second[1:]])
    assert [line["launch"] for line in lineage] == [0, 1, 1, 1]
    assert trained(lineage, END)["prompts"] == 8


def test_a_missing_step_is_reported() -> None:
    with pytest.raises(ValueError, match=r"\[1\]"):
        surviving([line for line in two_epochs() if line["step"] != 1])


def in_place_of_another() -> list[dict[str, Any]]:
    lines = two_epochs()
    lines[1] = step(1, 0, [1, 3])
    return lines


def twice_under_two_indices() -> list[dict[str, Any]]:
    lines = two_epochs()
    lines[1]["prompts"] = lines[0]["prompts"]
    return lines


@pytest.mark.parametrize(
    ("lines", "untold", "twice", "epochs_whole"),
    [
        (two_epochs(), [], [], 2),
        (in_place_of_another(), [2], [1], 1),
        (twice_under_two_indices(), [], [], 1),
    ],
)
def test_every_epoch_trains_every_row_once(
    lines: list[dict[str, Any]], untold: list[int], twice: list[int], epochs_whole: int
) -> None:
    found = trained(lines, END, PROMPTS)
    assert (found["prompts"], found["lost"]) == (8, [])
    assert (found["untold"], found["twice"]) == (untold, twice)
    assert found["epochs_whole"] == epochs_whole


@pytest.mark.parametrize(
    ("change", "lost", "untold"),
    [
        ({}, [], []),
        ({"open": [3, 6]}, [5], []),
        ({"done_ahead": []}, [4], [4]),
        ({"done_through": 4, "done_ahead": [], "open": [5, 6]}, [4], [3, 4]),
    ],
)
def test_a_difference_between_ledger_and_journal_is_named(
    change: dict[str, Any], lost: list[int], untold: list[int]
) -> None:
    end = {"done_through": 3, "done_ahead": [4], "open": [3, 5, 6], "skipped": []} | change
    report = trained([step(0, 0, [0, 2]), step(1, 0, [1, 4])], end)
    assert (report["lost"], report["untold"], report["twice"]) == (lost, untold, [])


# ---- moments and faults


def test_kills_are_spread_over_the_run_and_follow_from_the_seed() -> None:
    moments = trainer.plan(20, 60, seed=0)
    assert moments == trainer.plan(20, 60, seed=0) != trainer.plan(20, 60, seed=1)
    assert sum(moment.starting for moment in moments) == 2
    steps = [moment.step for moment in moments]
    assert steps == sorted(steps)
    assert steps[0] < 3 and steps[10] in range(28, 32) and steps[-1] <= 57
    assert all(0 <= moment.share < 1 for moment in moments)


def test_each_part_is_killed_and_frozen_in_turn_and_both_generators_at_last() -> None:
    found = faults.in_turn(12, 4, both=True)
    single = [faults.OF_GENERATORS[fault] for fault in found[:-1]]
    assert [part for how, part, _ in single if how == "kill"] == list(faults.PARTS) * 4
    frozen = [how == "freeze" for how, _, _ in single]
    assert (sum(frozen), len(found), found[-1]) == (4, 17, "kill EngineCore of both")
    assert not any(map(all, pairwise(frozen)))
