"""The chaos benchmarks, as far as they go without a run: what they would call lost, and what they
break."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos import (
    faults,
    generators,
    launch,
    nodes,
    orders,
    ranks,
    rewards,
    soak,
    trainer,
)
from benchmarks.chaos.journal import Journal, Reader, accounted_for, surviving, trained_once
from benchmarks.chaos.launch import TargetSettings

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


def test_settings_reach_the_target_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    from jsonargparse import ArgumentParser

    settings = soak.target_settings(chaos.make_parser("soak").parse_args(["--steps", "30"]))
    parser = ArgumentParser()
    parser.add_class_arguments(TargetSettings)
    assert TargetSettings(**vars(parser.parse_args(settings.words))) == settings


# ---- what a target leaves


def test_a_line_that_is_half_written_is_not_read_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).write("launch")
    reader = Reader(path)
    with path.open("a") as file:
        file.write('{"event": "st')
        file.flush()
        assert len(reader.refresh()) == 1
        file.write('ep"}\n')
    assert [line["event"] for line in reader.refresh()] == ["launch", "step"]
    assert Journal(path).launch == 1


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[launch.Target]:
    """A launch whose process is another program: it ends at once, and a child of it stays."""
    monkeypatch.setattr(launch, "GONE_S", 1.0)
    real = subprocess.Popen

    def start(command: list[str], **more: Any) -> Any:
        script = (
            "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
            "time.sleep(60)'])"
        )
        return real([sys.executable, "-c", script], **more)

    monkeypatch.setattr(launch.subprocess, "Popen", start)
    with launch.Target(TargetSettings(folder=str(tmp_path))) as one:
        yield one
        one.process.wait(120)
    for process in launch.psutil.process_iter():
        if environment(process).get(launch.MARK) == one.mark:
            with contextlib.suppress(launch.psutil.NoSuchProcess):
                process.kill()


def test_a_process_that_outlives_its_target_is_found(target: launch.Target) -> None:
    target.process.wait(120)
    (target.scratch / "left").touch()
    left = target.leftovers()
    assert (
        left["gone_s"] is None
        and left["temporary_files"] == ["left"]
        and not target.scratch.exists()
    )


def test_a_file_in_shared_memory_without_a_process_is_found(target: launch.Target) -> None:
    path = launch.SHM / f"lrl-chaos-{os.getpid()}"
    path.touch()
    try:
        assert path.name in target._shared()
    finally:
        path.unlink()
    assert path.name not in target._shared()


def test_a_target_that_ends_early_is_an_error_with_the_end_of_its_output(
    target: launch.Target,
) -> None:
    with pytest.raises(launch.Ended, match="ended with exit status 0 before its first step"):
        target.wait_for(lambda: False, 30.0, "its first step")
    target.leftovers()


def environment(process: Any) -> dict[str, str]:
    try:
        return process.environ()
    except launch.psutil.Error:
        return {}


def test_the_commands_of_the_docs_are_understood() -> None:
    assert chaos.make_parser("trainer").parse_args(["--kills", "2", "--steps", "8"]).kills == 2
    assert (
        not chaos.make_parser("generators")
        .parse_args(["--kills", "1", "--freezes", "1", "--no-both"])
        .both
    )
    assert (
        chaos.make_parser("soak").parse_args(["--steps", "2000", "--every-s", "60"]).every_s == 60
    )
    assert chaos.make_parser("sync").parse_args(["--print"]).print
    assert chaos.make_parser("rewards").parse_args(["--kinds", "crash", "nan"]).kinds == [
        "crash",
        "nan",
    ]


@pytest.mark.parametrize(
    "words", [["generators"], ["trainer"], ["soak"], ["sync", "--print"], ["rewards"]]
)
def test_a_recorded_measurement_is_printed_and_not_repeated(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(launch.ROOT)
    monkeypatch.setenv(soak.CACHE, "32")
    monkeypatch.setattr(records, "append", None)
    monkeypatch.setattr(rewards, "lent_server", None)
    for experiment in (generators, trainer, soak):
        monkeypatch.setattr(experiment, "Target", None)
    chaos.main(words)
    assert "|---|" in capsys.readouterr().out


def test_each_launch_that_dies_in_the_export_has_a_step_to_do() -> None:
    last_steps = [ranks.steps_until(12, "export", rank) for rank in reversed(range(ranks.RANKS))]
    assert (
        last_steps == sorted(set(last_steps))
        and max(last_steps) < ranks.steps_until(12, "step", 0) == 12
    )


def test_every_fault_of_two_machines_comes_in_every_phase() -> None:
    planned = nodes.plan("given", list(orders.PLACES), None)
    assert len(set(planned)) == len(planned) == 8 * len(orders.PLACES)
    assert ("head", "step") in nodes.plan("ray", ["sync"], None)
    assert ("rank 1", "save") in nodes.plan("trainer", ["save"], ["rank 1"])


def test_an_order_is_carried_out_once_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "PLACES", {"step": ("json", "dumps")})
    monkeypatch.setattr("json.dumps", json.dumps)  # put back at the end
    orders.obey(tmp_path)
    orders.give(tmp_path, "step", f"echo broken >> {tmp_path}/what")
    assert orders.carried_out(tmp_path) is None
    for _ in range(2):
        assert json.dumps([1]) == "[1]"
    assert (tmp_path / "what").read_text() == "broken\n" and orders.carried_out(tmp_path)
