"""Simulated plans agree with the search if one side's work binds, and dispatch policies are
compared; `lrl plan --compare` on simulated runs."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrl.cli.main import main
from lrl.planning.report import TIMELINE, with_timeline
from lrl.planning.responses import DrawnEpisodes, Lognormal, ObservedLengths, ReplayedLengths
from lrl.planning.roofline import parse_cluster
from lrl.planning.search import Layouts, Plan, asynchronous, synchronous
from lrl.planning.simulated import (
    DEFAULT_DISPATCH,
    PARTS,
    Outcome,
    best_dispatch,
    outcomes,
    read_run,
)
from lrl.planning.simulation import Simulation
from lrl.planning.workload import Workload, parse_lengths
from lrl.rollouts.timeline import Record, write
from lrl.routing.dispatch import LeastLoaded, LeastTokens, SkewnessAware
from lrl.types import Prompt
from tests.planning.shapes import QWEN_1_5B, shape
from tests.planning.test_costs import GENERATOR, TRAINER

EIGHT = parse_cluster("8xH100")
WORK = Workload(
    prompts=32, responses=8, prompt_tokens=256, lengths=parse_lengths("lognormal:mean=500,max=4000")
)
LAYOUTS = Layouts(shape(QWEN_1_5B), WORK)


def planned(bound: str, lag: int) -> Plan:
    """Returns the slowest plan with this bound, which binds it clearly."""
    plans = asynchronous(LAYOUTS, EIGHT, max_lag=lag)
    found = [plan for plan in plans if (plan.bound, plan.lag) == (bound, lag)]
    return max(found, key=lambda plan: plan.step_s)


def by_policy(plan: Plan) -> dict[str, Outcome]:
    return {one.policy: one for one in outcomes(plan, WORK)}


def test_if_training_binds_the_simulator_agrees_and_the_trainer_never_waits() -> None:
    plan = planned("training", lag=3)
    found = by_policy(plan)[DEFAULT_DISPATCH]
    assert found.step_s == pytest.approx(plan.step_s, rel=0.1)
    assert sum(share for cause, share in found.waits.items() if cause != "sync") < 0.02


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_if_the_longest_response_binds_the_simulator_agrees_and_the_trainer_waits_for_it(
    lag: int,
) -> None:
    plan = planned("longest response", lag)
    found = by_policy(plan)[DEFAULT_DISPATCH]
    assert found.step_s == pytest.approx(plan.step_s, rel=0.1)
    trained_s = (1 - sum(found.waits.values())) * found.step_s
    assert trained_s == pytest.approx(plan.training.seconds, rel=0.15)
    assert sum(found.waits.values()) > 0.5 and found.waits["last"] > found.waits["sync"]
    assert all(0 <= share < 1 for share in found.waits.values()) and 0 < found.write <= 1


def test_the_simulator_agrees_with_plans_that_take_turns() -> None:
    plan = min(synchronous(LAYOUTS, EIGHT), key=lambda plan: plan.step_s)
    assert by_policy(plan)[DEFAULT_DISPATCH].step_s == pytest.approx(plan.step_s, rel=0.25)


def test_every_dispatch_policy_is_simulated_that_differs() -> None:
    plan = planned("training", lag=3)
    assert plan.generation.generators > 1
    assert set(by_policy(plan)) == {DEFAULT_DISPATCH, "RoundRobin", "LeastTokens", "SkewnessAware"}
    alone = replace(plan, generation=replace(plan.generation, generators=1))
    assert set(by_policy(alone)) == {DEFAULT_DISPATCH, "LeastTokens"}


def test_dispatch_learns_the_prompts_share_of_the_length() -> None:
    lengths = Lognormal(median=100, sigma=1.0, longest=10_000)
    prompt, many = Prompt(id=7, token_ids=[1], text=""), sorted(lengths.of(7, 7, 4001))
    assert lengths.expected(prompt) == pytest.approx(many[2000], rel=0.1)
    assert lengths.expected(prompt, written=9999.0) == 10_000.0
    assert lengths.quantile(0.5) == pytest.approx(100, abs=1)
    assert lengths.quantile(0.9) == pytest.approx(360, rel=0.02)


def test_a_recipe_gets_a_dispatch_policy_only_if_it_is_clearly_faster() -> None:
    def took(policy: str, make: type, step_s: float) -> Outcome:
        return Outcome(policy=policy, make=make, step_s=step_s, waits={}, write=1.0)

    usual = took(DEFAULT_DISPATCH, LeastLoaded, 10.0)
    assert best_dispatch([usual, took("LeastTokens", LeastTokens, 9.95)]) is None
    assert best_dispatch([usual, took("LeastTokens", LeastTokens, 9.0)]) == {
        "class_path": "lrl.routing.dispatch.LeastTokens"
    }
    chosen = best_dispatch([usual, took("SkewnessAware", SkewnessAware, 8.0)])
    assert chosen is not None and chosen["init_args"]["decode_latency"] == {
        "step_ms": 8.4,
        "response_ms": 0.056,
    }
    assert chosen["init_args"].keys() <= inspect.signature(SkewnessAware).parameters.keys()


# ---- a run that has ended

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
    callbacks = with_timeline([{"class_path": "lrl.callbacks.WeightSync"}], 12.34567)
    of_strategy = {"generator_devices": generators, "server": {"max_num_seqs": 16}}
    strategy = {"class_path": trainer.pop("strategy", ""), "init_args": of_strategy}
    config = {
        "data": {"init_args": {**DATA, "dispatch": None, "replay": replay}},
        "trainer": {"callbacks": callbacks, "strategy": strategy} | trainer,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run; a parameter is its `attention_tokens`."""
    return configure(simulate(tmp_path, attention_tokens=getattr(request, "param", 0)))


@pytest.mark.parametrize("run", [0, 5000], indirect=True)
def test_the_forecast_of_a_simulated_run_equals_the_run(run: Path) -> None:
    found = read_run(run)
    assert [step.step for step in found.steps] == list(range(2, 10))
    for fact, forecast in zip(found.steps, found.forecast, strict=True):
        for part in PARTS.values():
            expected = pytest.approx(getattr(fact, part), rel=0.02, abs=0.01)
            assert getattr(forecast, part) == expected, part
        assert forecast.tokens == fact.tokens


def test_the_forecast_of_a_run_with_an_environment_plays_its_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, tool_ms = ObservedLengths([1, 3]), ObservedLengths([900])
    shapes = DrawnEpisodes(turns, observation_tokens=20, tool_ms=tool_ms)
    configure(simulate(tmp_path, episodes=shapes, prefix_cache=False))
    found = read_run(tmp_path, [900])
    for fact, forecast in zip(found.steps, found.forecast, strict=True):
        assert forecast.seconds == pytest.approx(fact.seconds, rel=0.02)
        assert forecast.tokens == fact.tokens
    quick = read_run(tmp_path)
    assert sum(step.seconds for step in quick.forecast) < 0.98 * sum(s.seconds for s in found.steps)
    assert main(["plan", "--compare", str(tmp_path), "--tool-ms", "fixed:900"]) == 0
    assert abs(off_by(capsys.readouterr().out, "step")) <= 2


@pytest.mark.parametrize("strategy", ["lrl.AsyncDDP", "lrl.AsyncFSDP"])
def test_a_forecast_has_the_runs_ranks(run: Path, strategy: str) -> None:
    simulate(run, ranks=3)
    found = read_run(configure(run, strategy=strategy, devices=5))
    for step, forecast in zip(found.steps, found.forecast, strict=True):
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
    assert "12.3" in same and "as planned" in same
    assert "Not in the forecast: data.replay." in slow
    for name in PARTS:
        assert name.strip() in same


def off_by(printed: str, row: str) -> float:
    rows = (line.strip("│ ").split("│") for line in printed.splitlines())
    cells = next(cells for cells in rows if cells[0].strip() == row)
    return float(cells[-1].strip(" %"))


def test_lengths_are_replayed_by_group_and_then_drawn() -> None:
    lengths = ReplayedLengths([[3, 9], [7, 7]])
    assert [lengths.of(prompt=5, index=index, responses=2) for index in (0, 1)] == [[3, 9], [7, 7]]
    assert set(lengths.of(prompt=5, index=2, responses=99)) == {3, 7, 9}


def test_a_planned_recipe_has_one_timeline_with_the_forecast() -> None:
    others = [{"class_path": name} for name in ("a", TIMELINE, "b")]
    found = with_timeline(others, 3.14159)
    assert [one["class_path"] for one in found] == [TIMELINE, "a", "b"]
    assert found[0]["init_args"] == {"planned_step_s": 3.142}
    assert [one["class_path"] for one in with_timeline([], 1.0)] == [TIMELINE]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("timeline.jsonl", None, "timeline.jsonl"),
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
