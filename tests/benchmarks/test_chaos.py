"""What a chaos benchmark calls lost, twice or growing, and which faults it plans."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chaos import (
    faults,
    trainer,
)
from benchmarks.chaos.journal import accounted_for, surviving, trained_once

PROMPTS = 4


def step(number: int, launched: int, indices: list[int], **more: Any) -> dict[str, Any]:
    # Another order in each epoch.
    prompts = [(index * 3 + index // PROMPTS) % PROMPTS for index in indices]
    return {
        "event": "step",
        "step": number,
        "launch": launched,
        "indices": indices,
        "prompts": prompts,
        **more,
    }


def two_epochs(launched: int = 0) -> list[dict[str, Any]]:
    return [step(number, launched, [2 * number, 2 * number + 1]) for number in range(4)]


# ---- what counts as lost


def test_a_step_counts_for_the_last_launch_that_trained_it() -> None:
    first, second = two_epochs(0), two_epochs(1)
    second[1]["indices"], second[2]["indices"] = [3, 4], [2, 5]
    lineage = surviving([*first[:3], *second[1:]])
    assert [line["launch"] for line in lineage] == [0, 1, 1, 1]
    assert trained_once(lineage, PROMPTS)["prompts"] == 8


def test_a_missing_step_is_reported() -> None:
    with pytest.raises(ValueError, match=r"\[1\]"):
        surviving([line for line in two_epochs() if line["step"] != 1])


def test_two_whole_epochs_are_recognised() -> None:
    assert trained_once(two_epochs(), PROMPTS) == {
        "prompts": 8,
        "missing": [],
        "twice": [],
        "epochs_whole": 2,
    }


def test_a_prompt_trained_in_the_place_of_another_is_found() -> None:
    lines = two_epochs()
    lines[1] = step(1, 0, [1, 3])
    found = trained_once(lines, PROMPTS)
    assert (found["missing"], found["twice"], found["epochs_whole"]) == ([2], [1], 1)


def test_a_row_that_is_trained_twice_under_two_indices_is_found() -> None:
    lines = two_epochs()
    lines[1]["prompts"] = lines[0]["prompts"]
    found = trained_once(lines, PROMPTS)
    assert (found["missing"], found["twice"], found["epochs_whole"]) == ([], [], 1)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {"lost": [], "untold": []}),
        ({"open": [6]}, {"lost": [5], "untold": []}),
        ({"done_ahead": []}, {"lost": [4], "untold": [4]}),
        ({"done_through": 4, "done_ahead": []}, {"lost": [4], "untold": [3, 4]}),
    ],
)
def test_a_difference_between_ledger_and_journal_is_named(
    change: dict[str, Any], found: dict[str, Any]
) -> None:
    end = {"done_through": 3, "done_ahead": [4], "open": [3, 5, 6], "skipped": []} | change
    if "done_through" not in change and change:
        end["open"] = change.get("open", [5, 6]) + [3]
    lines = [step(0, 0, [0, 2]), step(1, 0, [1, 4])]
    report = accounted_for(lines, end)
    assert {name: report[name] for name in found} == found
    assert report["twice"] == []


# ---- moments and faults


def test_kills_are_spread_over_the_run_and_follow_from_the_seed() -> None:
    moments = trainer.plan(20, 60, seed=0)
    assert moments == trainer.plan(20, 60, seed=0) != trainer.plan(20, 60, seed=1)
    assert sum(moment.starting for moment in moments) == 2
    steps = [moment.step for moment in moments]
    assert (
        steps == sorted(steps) and steps[-1] <= 57 and steps[0] < 3 and steps[10] in range(28, 32)
    )
    assert all(0 <= moment.share < 1 for moment in moments)


def test_each_part_is_killed_and_frozen_in_turn_and_both_generators_at_last() -> None:
    found = faults.in_turn(12, 4, both=True)
    kills = [fault.part for fault in found if not fault.freeze and len(fault.generators) == 1]
    assert kills == list(faults.PARTS) * 4
    assert sum(fault.freeze for fault in found) == 4 and len(found) == 17
    assert found[-1].generators == (0, 1)
    assert not any(a.freeze and b.freeze for a, b in zip(found, found[1:], strict=False))
