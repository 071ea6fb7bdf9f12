"""The index of `rollouts.jsonl`: only whole groups, whatever ended the run or changed the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lrl.viewer.rollout_file import RolloutIndex, Wanted, append, truncate
from tests.viewer.made_run import lines, rollout

GROUPS = [lines(step, 7 + step, [rollout("12"), rollout("9", 0.0)]) for step in range(4)]


def written(folder: Path, *texts: str) -> RolloutIndex:
    """The index of a file to which these texts were appended."""
    index = RolloutIndex(folder / "rollouts.jsonl")
    for text in texts:
        append(index.path, text)
    index.refresh()
    return index


def steps_of(index: RolloutIndex) -> list[int]:
    return [group.shown["step"] for group in index.groups]


@pytest.mark.parametrize("lost", [1, 40, 700, len(GROUPS[3]) - 1])
def test_a_run_that_was_killed_in_the_middle_of_a_line_keeps_its_whole_groups(
    lost: int, tmp_path: Path
) -> None:
    index = written(tmp_path, "".join(GROUPS)[:-lost])
    assert steps_of(index) == [0, 1, 2] and index.cut_short
    found = index.read(2, 9)
    assert found is not None and "".join(found["responses"][0]["texts"]) == "12"
    assert index.read(3, 10) is None


def test_lines_behind_half_a_line_are_read(tmp_path: Path) -> None:
    """A full disk ended the write, and there was room again at the next step."""
    index = written(tmp_path, GROUPS[0] + GROUPS[1][:-30], GROUPS[2])
    assert steps_of(index) == [0, 2] and not index.cut_short


@pytest.mark.parametrize("new", ['"answers": [', '"responses": '])
def test_a_broken_group_is_left_out(new: str, tmp_path: Path) -> None:
    broken = GROUPS[1].replace('"responses": [', new, 1)
    index = written(tmp_path, GROUPS[0], broken, GROUPS[2])
    assert steps_of(index) == [0, 2] and not index.cut_short
    assert truncate(index.path, step=2) == 1, "a run resumes beside it"


def test_a_file_that_grows_is_read_on_and_its_last_group_waits_until_it_is_whole(
    tmp_path: Path,
) -> None:
    index = written(tmp_path, GROUPS[0] + GROUPS[1][:50])
    assert steps_of(index) == [0] and index.cut_short
    before = index.revision
    with index.path.open("a") as file:
        file.write(GROUPS[1][50:])
    index.refresh()
    assert steps_of(index) == [0, 1] and not index.cut_short and index.revision > before
    before = index.revision
    index.refresh()
    assert index.revision == before and steps_of(index) == [0, 1]


def test_a_resumed_run_has_each_group_once_and_a_viewer_sees_it(tmp_path: Path) -> None:
    index = written(tmp_path, "".join(GROUPS)[:-10])
    path = index.path
    assert truncate(path, step=2) == 1
    again = [lines(step, 7 + step, [rollout("34"), rollout("9", 0.0)]) for step in (2, 3)]
    for text in again:
        append(path, text)
    index.refresh()
    assert steps_of(index) == [0, 1, 2, 3]
    assert path.read_text() == "".join(GROUPS[:2] + again)
    found = index.read(2, 9)
    assert found is not None and found["responses"][0]["text"] == "34"
    assert index.revision > 3, "though the file is as long as before"
    assert os.listdir(tmp_path) == [path.name]
    assert truncate(path, step=4) == 0 and truncate(tmp_path / "none", step=4) == 0


def test_groups_are_found_by_step_prompt_reward_lag_end_and_failure(tmp_path: Path) -> None:
    index = written(
        tmp_path,
        lines(3, 0, [rollout("a", 0.0, 3), rollout("b", 1.0, 3)], "red"),
        lines(4, 1, [rollout("c", 0.5, 2), rollout("d", None, 4, "timeout: 9 s")], "blue"),
        lines(5, 2, [rollout("e", 0.0, 5)], "Green"),
    )

    def found(order: str = "oldest", **wanted: object) -> list[int]:
        groups = index.find(Wanted(**wanted), order)  # type: ignore[arg-type]
        return [group.shown["index"] for group in groups]

    assert found() == [0, 1, 2] and found("newest") == [2, 1, 0]
    assert found(first_step=4) == [1, 2] and found(last_step=4) == [0, 1]
    assert found(prompt="green") == [2] and found(prompt="1") == [1]
    assert found(least_reward=0.4) == [0, 1] and found(most_reward=0.1) == [0, 2]
    assert found(least_reward=0.4, most_reward=0.6) == [1]
    assert found(least_lag=1) == [1] and found("lag")[0] == 1
    assert found(failure="timeout") == [1] and found(finish_reason="stop") == [0, 1, 2]
    assert found("worst") == [2, 0, 1] and found("best")[-1] == 2
