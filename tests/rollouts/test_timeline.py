"""A timeline comes back as it was written, has no step twice, and names a line that is none."""

import json
from pathlib import Path

import pytest

from lrl.rollouts.timeline import KINDS, StepRecord, read, truncate, write
from tests.planning.test_costs import timeline


def test_a_timeline_survives_writing_and_reading(tmp_path: Path) -> None:
    records = timeline()
    write(tmp_path / "timeline.jsonl", records)
    assert read(tmp_path / "timeline.jsonl") == records
    assert {type(record) for record in records} == {*KINDS.values()}


@pytest.mark.parametrize("cut_short", ["", '{"kind": "micro_ba'])
@pytest.mark.parametrize("steps", [0, 2, 9])
def test_a_resumed_run_records_no_step_twice(tmp_path: Path, steps: int, cut_short: str) -> None:
    path, whole = tmp_path / "timeline.jsonl", timeline()
    write(path, whole[:-3])
    path.write_text(path.read_text() + cut_short)
    kept = truncate(path, steps)
    ends = [place for place, record in enumerate(whole) if isinstance(record, StepRecord)]
    assert [step.step for step in kept] == list(range(min(steps, 5)))
    rest = whole[ends[len(kept) - 1] + 1 if kept else 0 :]
    write(path, rest, "a")
    assert read(path) == whole


def test_a_file_of_an_older_release_is_read(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    write(path, records := timeline())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line |= {"step": {"other_s": 0.0, "attention_tokens": 0}, "group": {"turns": []}}.get(
            line["kind"], {}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(path) == records


@pytest.mark.parametrize("text", ["no JSON", '{"kind": "micro_batch", "seconds": 1.0}'])
def test_an_invalid_line_is_an_error_with_its_number(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timeline.jsonl"
    write(path, timeline()[:2])
    with path.open("a") as file:
        file.write(text + "\n")
    with pytest.raises(ValueError, match="timeline.jsonl, line 3: not a record"):
        read(path)
