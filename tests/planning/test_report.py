"""`lrl plan --compare` on simulated runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lrl.cli.main import main
from lrl.planning.report import PARTS, read_run
from lrl.planning.simulation import Simulation
from lrl.planning.workload import Lognormal
from lrl.rollouts.timeline import Record, write
from tests.planning.test_costs import GENERATOR, TRAINER

DATA = {"groups_per_step": 6, "rollouts_per_group": 4, "max_lag": 1, "stragglers": "wait"}
DATA |= {"micro_batch_tokens": 2000}


def simulate(folder: Path, **changes: Any) -> Path:
    """Writes the timeline of a simulated run of two generators."""
    records: list[Record] = []
    scene = Simulation(
        generators=[GENERATOR] * 2,
        trainer=TRAINER,
        lengths=Lognormal(200, 1.0, 2000, seed=3),
        steps=10,
        max_num_seqs=16,
        prompt_tokens=50,
        **DATA | changes,  # type: ignore[arg-type]
    )
    scene.run(records.append)
    write(folder / "timeline.jsonl", records)
    return folder


def configure(folder: Path, generators: int = 2, replay: Any = None, **trainer: Any) -> Path:
    """Writes the settings of the run."""
    of_strategy = {"generator_devices": generators, "server": {"max_num_seqs": 16}}
    strategy = {"class_path": trainer.pop("strategy", ""), "init_args": of_strategy}
    config = {
        "data": {"init_args": {**DATA, "dispatch": None, "replay": replay}},
        "trainer": {"strategy": strategy} | trainer,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run; a parameter is its `attention_tokens`."""
    return configure(simulate(tmp_path, attention_tokens=getattr(request, "param", 0)))


@pytest.mark.parametrize("run", [0, 5000], indirect=True)
def test_the_forecast_of_a_simulated_run_equals_the_run(run: Path) -> None:
    facts, forecasts = read_run(run)
    assert [step.step for step in facts] == list(range(2, 10))
    for fact, forecast in zip(facts, forecasts, strict=True):
        for part in PARTS.values():
            expected = pytest.approx(getattr(fact, part), rel=0.02, abs=0.01)
            assert getattr(forecast, part) == expected, part
        assert forecast.tokens == fact.tokens


@pytest.mark.parametrize("strategy", ["lrl.AsyncDDP", "lrl.AsyncFSDP"])
def test_a_forecast_has_the_runs_ranks(run: Path, strategy: str) -> None:
    simulate(run, ranks=3)
    for step, forecast in zip(*read_run(configure(run, strategy=strategy, devices=5)), strict=True):
        assert forecast.train_s == pytest.approx(step.train_s, rel=0.02)
    with pytest.raises(ValueError, match="trainer.devices is auto"):
        read_run(configure(run, strategy=strategy, devices="auto"))


def test_a_run_slower_than_its_forecast_shows_in_the_table(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--compare", str(run)]) == 0
    same = capsys.readouterr().out
    # As if one of the two had been lost; the simulator knows no replay.
    configure(run, generators=1, replay={"class_path": "lrl.Replay"})
    assert main(["plan", f"--compare={run}"]) == 0
    slow = capsys.readouterr().out
    assert off_by(same, "step") == 0 and off_by(slow, "step") > 20
    assert "Not in the forecast: data.replay." in slow
    for name in PARTS:
        assert name.strip() in same


def off_by(printed: str, row: str) -> float:
    line = next(line for line in printed.splitlines() if line.startswith(f"{row}  "))
    return float(line.split()[-1].strip("%"))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.yaml", None, "config.yaml"),
        ("timeline.jsonl", "", 'no record of kind "micro_batch"'),
        ("timeline.jsonl", '{"kind": "st', "not a record of a timeline"),
    ],
)
def test_an_incomplete_run_folder_is_one_error_with_the_missing_part(
    run: Path, capsys: pytest.CaptureFixture[str], file: str, content: str | None, words: str
) -> None:
    (run / file).unlink()
    if content is not None:
        (run / file).write_text(content)
    assert main(["plan", "--compare", str(run)]) == 2
    text = capsys.readouterr().err
    assert text.startswith("lrl: error: ") and words in text and text.count("\n") == 1
