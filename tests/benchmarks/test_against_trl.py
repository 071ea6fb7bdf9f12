"""The benchmark against TRL, as far as it goes without TRL: equal settings, resuming, scoring,
table and picture."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.against_trl import __main__ as against_trl
from benchmarks.against_trl import runs, settings
from benchmarks.against_trl.report import draw, table
from benchmarks.against_trl.scoring import accuracy, until_end
from benchmarks.against_trl.settings import SYSTEMS, Clock, Job, checkpoints, finish_reason
from lrl.quickstart.warmup import WarmUp, make_policy, make_tokenizer

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
EOS = make_tokenizer().eos_token_id
TINY = WarmUp(loss=10.0, habit_steps=2, examples=4)


def row(system: str, seed: int, step: int, accuracy: float, steps: int = 60) -> dict[str, Any]:
    row = {
        "system": system,
        "seed": seed,
        "steps": steps,
        "step": step,
        "samples": 256 * step,
        "seconds": 2.0 * step,
    }
    return row | {"accuracy": accuracy, "start_s": 20.0, "trl": "1"}


def rows(systems: tuple[str, ...] = tuple(SYSTEMS)) -> list[dict[str, Any]]:
    """Three seeds that end at 0.9, 0.95 and 1.0."""
    return [
        row(system, seed, step, 0.3 + step / 60 * (0.6 + 0.05 * seed))
        for system in systems
        for seed in (0, 1, 2)
        for step in checkpoints(60)
    ]


def job(folder: Path, **changes: Any) -> Job:
    paths = {"policy": "p", "prompts": "q", "folder": str(folder)}
    return Job(**{"seed": 0, "max_lag": 0, "steps": 60, **paths, **changes})


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Stands in for the runs: notes which were asked for and appends their rows."""
    asked = []

    def measure(system: str, seed: int, steps: int, out: Path, folder: Path) -> None:
        asked.append((system, seed))
        with out.open("a") as file:
            file.writelines(
                json.dumps(row(system, seed, step, 0.5, steps)) + "\n"
                for step in checkpoints(steps)
            )

    monkeypatch.setattr(against_trl, "measure", measure)
    return asked


def words(folder: Path, *more: str) -> list[str]:
    return ["--out", str(folder / "rows.jsonl"), "--plot", str(folder / "plot.png"), *more]


def test_both_sides_learn_with_the_quickstarts_settings() -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    model, data = recipe["model"]["init_args"], recipe["data"]["init_args"]
    assert {name: model[name] for name in ("lr", "warmup_steps", "schedule")} == {
        "lr": settings.LR, "warmup_steps": settings.WARMUP_STEPS, "schedule": settings.SCHEDULE
    }  # fmt: skip
    sizes = ("groups_per_step", "rollouts_per_group", "max_prompt_tokens", "max_response_tokens")
    shared = (settings.GROUPS, settings.ROLLOUTS, settings.PROMPT_TOKENS, settings.ANSWER_TOKENS)
    assert [data[name] for name in sizes] == list(shared)
    assert recipe["trainer"]["max_steps"] == settings.STEPS


def test_a_run_is_scored_before_its_first_step_at_every_tenth_and_after_its_last() -> None:
    assert checkpoints(60) == [0, 10, 20, 30, 40, 50, 60]
    assert checkpoints(4) == [0, 4]
    assert job(Path("f")).checkpoint(0) == Path("p") and job(Path("f")).checkpoint(10) == Path(
        "f/step-010"
    )


def test_a_side_gets_the_job_it_was_sent(tmp_path: Path) -> None:
    sent = job(tmp_path, seed=2, max_lag=1)
    assert (
        Job.read(json.dumps({name: getattr(sent, name) for name in Job.__dataclass_fields__}))
        == sent
    )


def test_the_clock_counts_samples_and_leaves_the_start_out(tmp_path: Path) -> None:
    clock = Clock(job(tmp_path))
    clock.start(process_began=0.0)
    clock.step_done(1, 256)
    clock.step_done(2, 255)
    first, second, third = map(json.loads, clock.path.read_text().splitlines())
    assert first["seconds"] == 0 and first["start_s"] > 1e9
    assert [first["samples"], second["samples"], third["samples"]] == [0, 256, 511]
    assert 0 < second["seconds"] <= third["seconds"] < 60


def test_an_interrupted_comparison_continues_with_the_missing_runs(
    tmp_path: Path, measured: list[tuple[str, int]]
) -> None:
    broken_off = [row("lrl-0", 0, step, 0.5) for step in (0, 10)]
    other_length = [row("lrl-1", 0, 60, 0.5, steps=120)]
    write(tmp_path / "rows.jsonl", [*rows(("trl",)), *broken_off, *other_length])
    against_trl.main(words(tmp_path, "--seeds", "0", "1"))
    assert measured == [("lrl-0", 0), ("lrl-1", 0), ("lrl-0", 1), ("lrl-1", 1)]
    measured.clear()
    against_trl.main(words(tmp_path, "--seeds", "0", "1"))
    assert measured == []


def test_plot_only_measures_nothing(
    tmp_path: Path, measured: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="holds no run of 60 steps"):
        against_trl.main(words(tmp_path, "--plot-only"))
    write(tmp_path / "rows.jsonl", rows(("trl",)))
    against_trl.main(words(tmp_path, "--plot-only"))
    assert measured == []
    assert "TRL GRPOTrainer" in capsys.readouterr().out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_rows_join_accuracy_and_clock_and_the_last_row_is_appended_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(system: str, made: Job, folder: Path) -> None:
        clock = Clock(made)
        clock.start(process_began=0.0)
        for step in range(1, made.steps + 1):
            clock.step_done(step, 256)

    monkeypatch.setattr(runs, "POLICIES", tmp_path)
    monkeypatch.setattr(runs, "make_policy", lambda folder, seed: make_policy(folder, seed, TINY))
    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(
        runs, "accuracy", lambda folder: 0.25 if folder.name == "policy-seed3" else 0.75
    )
    out = tmp_path / "rows.jsonl"
    runs.measure("lrl-1", 3, 12, out, tmp_path / "runs")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(one["step"], one["samples"], one["accuracy"]) for one in found] == [
        (0, 0, 0.25), (10, 2560, 0.75), (12, 3072, 0.75)
    ]  # fmt: skip
    assert all(one["start_s"] > 0 for one in found)
    assert runs.is_done(out, "lrl-1", 3, 12) and not runs.is_done(out, "lrl-1", 3, 60)


def test_both_sides_take_the_same_prompts_with_the_token_ids_of_the_policys_tokenizer(
    tmp_path: Path,
) -> None:
    policy = make_policy(tmp_path / "policy", 0, TINY)
    paths = [
        runs.write_prompts(tmp_path / name, policy, seed, 32)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    first, again, other = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in paths
    )
    assert first == again != other and len(first) == 32
    for line in first:
        assert line["token_ids"] == make_tokenizer()(line["prompt"]).input_ids


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


def test_a_policy_that_learned_nothing_scores_zero(tmp_path: Path) -> None:
    assert accuracy(make_policy(tmp_path / "policy", 0, TINY)) == 0.0


def test_the_table_has_a_line_for_each_measured_system_and_means_over_seeds() -> None:
    heads, rule, *lines = table(rows(("trl", "lrl-1"))).splitlines()
    assert {line.count("|") for line in (heads, rule, *lines)} == {heads.count("|")}
    assert [line.split(" | ")[0] for line in lines] == ["| TRL GRPOTrainer", "| lrl, max_lag 1"]
    cells = lines[0].strip("| ").split(" | ")
    assert cells[1:3] == ["3", "0.300"]
    assert cells[8].startswith("0.950 (0.826 to")
    assert cells[9:] == ["120", "2.00", "20"]


def test_the_picture_is_drawn_from_any_part_of_the_rows(tmp_path: Path) -> None:
    draw(rows()[:9], tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").stat().st_size > 10_000


def test_trls_side_imports_nothing_that_trls_environment_lacks() -> None:
    folder, ours = Path(settings.__file__).parent, set()
    for name in ("trl_side.py", "trl_speed.py"):
        for node in ast.walk(ast.parse((folder / name).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("lrl.", "benchmarks.")
            ):
                ours.add(node.module)
    # It is among those read, and imports TRL itself.
    ours.discard("benchmarks.against_trl.trl_side")
    assert {"lrl.training.schedule", "lrl.quickstart.task"} <= ours
    block = (
        "import sys; sys.modules.update(dict.fromkeys(['lightning', 'vllm', 'peft', "
        "'jsonargparse', 'aiohttp']))"
    )
    imports = "; ".join(f"import {name}" for name in sorted(filter(None, ours)))
    subprocess.run([sys.executable, "-c", f"{block}; {imports}"], check=True, cwd=folder.parents[1])
