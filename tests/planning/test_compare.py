"""`lrl plan --compare` on simulated runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lrl.cli.main import main
from lrl.planning.compare import PARTS, read_run
from lrl.planning.report import THROUGHPUT, TIMELINE, with_timeline
from lrl.planning.responses import DrawnEpisodes, Lognormal, ObservedLengths, ReplayedLengths
from lrl.planning.simulation import Simulation
from lrl.rollouts.timeline import Record, StepRecord, write
from tests.planning.test_costs import GENERATOR, TRAINER

DATA = {
    "groups_per_step": 6,
    "rollouts_per_group": 4,
    "max_lag": 1,
    "stragglers": "wait",
    "micro_batch_tokens": 2000,
}


def simulated(generators: int, slots: int, **data: Any) -> list[Record]:
    records: list[Record] = []
    scene = Simulation(
        generators=[GENERATOR] * generators,
        trainer=TRAINER,
        lengths=Lognormal(200, 1.0, 2000, seed=3),
        steps=10,
        max_num_seqs=slots,
        prompt_tokens=50,
        **data,
    )
    scene.run(records.append)
    return records


def config(**strategy: Any) -> dict[str, Any]:
    callbacks = with_timeline([{"class_path": "lrl.callbacks.WeightSync"}], 12.34567)
    return {
        "data": {
            "class_path": "lrl.RolloutDataModule",
            "init_args": {**DATA, "dispatch": None, "replay": None},
        },
        "trainer": {"callbacks": callbacks, "strategy": {"init_args": strategy}},
    }


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run of two generators; a parameter is its `attention_tokens`."""
    records = simulated(2, 16, attention_tokens=getattr(request, "param", 0), **DATA)
    write(tmp_path / "timeline.jsonl", records)
    asked = config(generator_devices=2, server={"max_num_seqs": 16})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asked))
    return tmp_path


@pytest.mark.parametrize("run", [0, 5000], indirect=True)
def test_the_forecast_of_a_simulated_run_equals_the_run(run: Path) -> None:
    found = read_run(run)
    assert [step.step for step in found.steps] == list(range(2, 10))
    for fact, forecast in zip(found.steps, found.forecast, strict=True):
        for part in PARTS.values():
            assert getattr(forecast, part) == pytest.approx(
                getattr(fact, part), rel=0.02, abs=0.01
            ), part
        assert forecast.tokens == fact.tokens


def test_the_forecast_of_a_run_with_an_environment_plays_its_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool_ms = ObservedLengths([900])
    shapes = DrawnEpisodes(ObservedLengths([1, 3]), observation_tokens=20, tool_ms=tool_ms)
    write(
        tmp_path / "timeline.jsonl", simulated(2, 16, episodes=shapes, prefix_cache=False, **DATA)
    )
    asked = config(generator_devices=2, server={"max_num_seqs": 16})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asked))
    found = read_run(tmp_path, tool_ms)
    for fact, forecast in zip(found.steps, found.forecast, strict=True):
        assert forecast.seconds == pytest.approx(fact.seconds, rel=0.02)
        assert forecast.tokens == fact.tokens
    quick = read_run(tmp_path)
    assert sum(step.seconds for step in quick.forecast) < 0.98 * sum(s.seconds for s in found.steps)
    assert main(["plan", "--compare", str(tmp_path), "--tool-ms", "fixed:900"]) == 0
    assert abs(off_by(capsys.readouterr().out, "step")) <= 2


@pytest.mark.parametrize("strategy", ["lrl.AsyncDDP", "lrl.AsyncFSDP"])
def test_a_forecast_has_the_runs_ranks(run: Path, strategy: str) -> None:
    write(run / "timeline.jsonl", simulated(2, 16, ranks=3, **DATA))
    asked = config(generator_devices=2, server={"max_num_seqs": 16})
    asked["trainer"]["strategy"]["class_path"] = strategy
    for devices in (5, "auto"):
        (run / "config.yaml").write_text(
            yaml.safe_dump(asked | {"trainer": asked["trainer"] | {"devices": devices}})
        )
        if devices == "auto":
            with pytest.raises(ValueError, match="trainer.devices is auto"):
                read_run(run)
        else:
            for step, forecast in zip((found := read_run(run)).steps, found.forecast, strict=True):
                assert forecast.train_s == pytest.approx(step.train_s, rel=0.02)


def test_a_run_slower_than_its_forecast_shows_in_the_table(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--compare", str(run)]) == 0
    same = capsys.readouterr().out
    # As if one of the two had been lost.
    asked = config(generator_devices=1, server={"max_num_seqs": 16})
    (run / "config.yaml").write_text(yaml.safe_dump(asked))
    assert main(["plan", f"--compare={run}"]) == 0
    slow = capsys.readouterr().out
    assert off_by(same, "step") == 0 and off_by(slow, "step") > 20
    assert "12.3" in same and "as planned" in same
    for name in PARTS:
        assert name.strip() in same


def off_by(printed: str, row: str) -> float:
    line = next(
        line for line in printed.splitlines() if line.strip("│ ").split("│")[0].strip() == row
    )
    return float(line.rstrip("│ ").split("│")[-1].strip(" %"))


def test_lengths_are_replayed_by_group_and_then_drawn() -> None:
    lengths = ReplayedLengths([[3, 9], [7, 7]])
    assert [lengths.of(prompt=5, index=index, responses=2) for index in (0, 1)] == [[3, 9], [7, 7]]
    assert set(lengths.of(prompt=5, index=2, responses=99)) == {3, 7, 9}


def test_settings_outside_the_simulator_are_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = yaml.safe_load((run / "config.yaml").read_text())
    asked["data"]["init_args"]["replay"] = {"class_path": "lrl.Replay"}
    (run / "config.yaml").write_text(yaml.safe_dump(asked))
    assert main(["plan", "--compare", str(run)]) == 0
    assert "Not in the forecast: data.replay." in capsys.readouterr().out


def test_a_planned_recipe_has_one_timeline_with_the_forecast() -> None:
    others = [
        {"class_path": "a"},
        {"class_path": THROUGHPUT},
        {"class_path": TIMELINE},
        {"class_path": "b"},
    ]
    found = with_timeline(others, 3.14159)
    assert [one["class_path"] for one in found] == ["a", THROUGHPUT, TIMELINE, "b"]
    assert found[2]["init_args"] == {"planned_step_s": 3.142}
    assert [one["class_path"] for one in with_timeline([], 1.0)] == [THROUGHPUT, TIMELINE]


def only_steps(run: Path) -> None:
    write(
        run / "timeline.jsonl",
        [record for record in simulated(2, 16, **DATA) if isinstance(record, StepRecord)],
    )


def no_config(run: Path) -> None:
    (run / "config.yaml").unlink()


def no_timeline(run: Path) -> None:
    (run / "timeline.jsonl").unlink()


def empty(run: Path) -> None:
    (run / "timeline.jsonl").write_text("")


def torn(run: Path) -> None:
    with (run / "timeline.jsonl").open("a") as file:
        file.write('{"kind": "st')


def other_yaml(run: Path) -> None:
    (run / "config.yaml").write_text("data: 3")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_timeline, "timeline.jsonl"),
        (no_config, "config.yaml"),
        (empty, 'no record of kind "group"'),
        (only_steps, 'no record of kind "group"'),
        (torn, "not a record of a timeline"),
        (other_yaml, "config.yaml is not of a run of `lrl fit`"),
    ],
)
def test_an_incomplete_run_folder_is_one_error_with_the_missing_part(
    run: Path, capsys: pytest.CaptureFixture[str], spoil: Any, words: str
) -> None:
    spoil(run)
    assert main(["plan", "--compare", str(run)]) == 2
    text = capsys.readouterr().err
    assert text.startswith("lrl: error: ") and words in text and text.count("\n") == 1
