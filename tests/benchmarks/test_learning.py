"""The benchmarks of learning, as far as they go without a server: rows, resuming, intervals,
tables, differences."""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from benchmarks import lag_report, lag_sweep, mismatch, quickstart_run, records
from lrl.advantages import GroupMean
from lrl.callbacks import Evaluation
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import StepLoader
from lrl.types import Group, MicroBatch, Prompt, Rollout

SETTINGS = quickstart_run.RunSettings(
    seed=0, max_lag=2, lr=1e-3, schedule="constant", steps=2, groups=1, responses=2
)  # fmt: skip
TINY = ["--objectives", "AIPO", "REINFORCE", "--lags", "0", "4", "--seeds", "0", "1"]


def group(index: int, logprob: float) -> Group:
    prompt = Prompt(id=index, token_ids=[1, 4, 5, 13], text="12+")
    rollouts = [
        Rollout(
            token_ids=[3 + index, 4 + reward, 2],
            logprobs=[logprob] * 3,
            versions=[0] * 3,
            finish_reason="stop",
            text="",
            reward=float(reward),
        )
        for reward in range(2)
    ]
    return Group(index=index, prompt=prompt, rollouts=rollouts)


class MadeUpStep:
    """One made-up group, in the place of generated ones."""

    def __init__(self, one: Group) -> None:
        self.groups = [one]
        self.num_tokens = sum(len(rollout.token_ids) for rollout in one.rollouts)
        self.num_sequences = len(one.rollouts)

    def __iter__(self) -> Iterator[MicroBatch]:
        packer = Packer(64, GroupMean(), 1.0)
        for (batch,) in [*packer.add(self.groups[0]), *packer.flush()]:
            assert batch is not None
            yield batch

    def finish(self) -> None:
        """Nobody is told."""


class MadeUp(L.LightningDataModule):
    """A step for each group."""

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__()
        self.groups = groups
        self.step_stream: MadeUpStep | None = None

    def train_dataloader(self) -> StepLoader:
        return StepLoader(len(self.groups), self.next_step)  # type: ignore[arg-type]

    def next_step(self) -> MadeUpStep:
        self.step_stream = MadeUpStep(self.groups[self.trainer.global_step])  # type: ignore[union-attr]
        return self.step_stream


def quiet_trainer(callbacks: Sequence[L.Callback]) -> L.Trainer:
    return L.Trainer(
        accelerator=(
            "cpu"
        ), max_steps=2, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


@pytest.fixture
def without_server(quickstart_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`measure` with made-up responses; those of the second step have no behaviour log-prob."""

    def make_trainer(
        server: Any, settings: Any, callbacks: Sequence[L.Callback], folder: Path
    ) -> L.Trainer:
        return quiet_trainer(
            [callback for callback in callbacks if not isinstance(callback, Evaluation)]
        )

    monkeypatch.setattr(quickstart_run, "policy_of", lambda seed: quickstart_policy)
    monkeypatch.setattr(lag_sweep, "make_trainer", make_trainer)
    monkeypatch.setattr(
        lag_sweep, "make_data", lambda settings: MadeUp([group(0, -2.0), group(1, float("nan"))])
    )


def row(
    objective: str = "AIPO", lag: int = 0, seed: int = 0, accuracies: Sequence[float] = (0.4, 0.9)
) -> Any:
    series = {name: [0.5, None, 1.0] for name in lag_sweep.SERIES} | {"tokens": [100, 0, 300]}
    evaluations = [
        {"step": 10 * n, "accuracy": value, "problems": 500} for n, value in enumerate(accuracies)
    ]
    found = {
        "objective": objective,
        "max_lag": lag,
        "seed": seed,
        "groups": 8,
        "responses": 16,
        "diverged_at": None,
    }
    return found | {"series": series, "evaluations": evaluations}


# ---- rows and resuming


def test_a_run_that_diverges_is_a_row_with_its_step_and_its_last_evaluation(
    tmp_path: Path, without_server: None
) -> None:
    record = lag_sweep.measure(SimpleNamespace(), "AIPO", SETTINGS, tmp_path, 10)  # type: ignore[arg-type]
    assert record["diverged_at"] == 1
    assert record["series"]["reward"] == [0.5]
    assert record["series"]["tokens"] == [6]
    assert record["series"]["lag_mean"] == [0.0]
    assert set(record["by_lag"]) == {"0"}
    records.append(tmp_path / "out.jsonl", record)
    assert (
        records.find(records.read(tmp_path / "out.jsonl"), lag_sweep.described("AIPO", SETTINGS))
        is not None
    )


def test_any_other_error_ends_the_sweep(
    tmp_path: Path, without_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*args: Any) -> None:
        raise RuntimeError("generator 0 does not compute what the policy computes")

    monkeypatch.setattr(lag_sweep, "make_trainer", lambda *args: SimpleNamespace(fit=fit))
    with pytest.raises(RuntimeError, match="generator 0"):
        lag_sweep.measure(SimpleNamespace(), "AIPO", SETTINGS, tmp_path, 10)  # type: ignore[arg-type]


def test_a_recorded_run_with_the_same_settings_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int, int]] = []

    def measure(
        server: Any, objective: str, settings: Any, folder: Path, every: int
    ) -> dict[str, Any]:
        if len(ran) == 3:
            raise KeyboardInterrupt
        ran.append((objective, settings.max_lag, settings.seed))
        return row(accuracies=[0.5]) | {"seconds": 1.0} | lag_sweep.described(objective, settings)

    monkeypatch.setattr(lag_sweep, "measure", measure)
    monkeypatch.setattr(lag_sweep, "policy_of", lambda seed: tmp_path)
    words = [
        *TINY,
        "--out",
        str(tmp_path / "out.jsonl"),
        "--folder",
        str(tmp_path),
        "--plot",
        str(tmp_path / "a.png"),
    ]
    with pytest.raises(KeyboardInterrupt):
        lag_sweep.main(words)
    first, ran[:] = list(ran), []
    with pytest.raises(KeyboardInterrupt):
        lag_sweep.main(words)
    assert not set(first) & set(ran)
    ran[:] = [("", 0, 0)]
    lag_sweep.main(words)
    assert len(ran) == 3 and len(records.read(tmp_path / "out.jsonl")) == 8
    ran.clear()
    lag_sweep.main(words)
    assert not ran
    with pytest.raises(KeyboardInterrupt):
        lag_sweep.main([*words, "--lr", "0.5"])
    assert len(ran) == 3


def test_the_first_seed_covers_the_whole_table() -> None:
    args: argparse.Namespace = lag_sweep.make_parser().parse_args(TINY)
    runs = [
        (objective, settings.max_lag, settings.seed)
        for objective, settings in lag_sweep.wanted(args)
    ]
    assert [seed for _, _, seed in runs] == [0] * 4 + [1] * 4
    assert {run[:2] for run in runs[:4]} == {
        (name, lag) for name in ("AIPO", "REINFORCE") for lag in (0, 4)
    }


def test_every_objective_of_the_sweep_can_be_made() -> None:
    for name, arguments in lag_sweep.OBJECTIVES.items():
        assert type(getattr(lag_sweep.lrl.objectives, name)(**arguments)).__name__ == name


def test_a_number_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    records.append(
        tmp_path / "out.jsonl", {"kl": records.rounded(float("inf")), "ess": records.rounded(1 / 3)}
    )
    (found,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (found["kl"], found["ess"]) == (None, 0.33333)


def test_an_evaluation_is_of_one_version_every_so_many_steps_and_not_twice_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluated: list[int] = []
    monkeypatch.setattr(
        Evaluation, "run", lambda self, trainer: evaluated.append(trainer.global_step)
    )
    evaluation = quickstart_run.held_out(10)
    for step in range(1, 41):
        evaluation.on_train_batch_end(SimpleNamespace(global_step=step, max_steps=40), None)  # type: ignore[arg-type]
    assert evaluated == [10, 20, 30]
    assert evaluation.seconds > 0


# ---- tables


def test_the_goal_is_reached_at_the_first_evaluation_that_finds_it() -> None:
    assert lag_report.steps_to(row(accuracies=[0.4, 0.79, 0.8, 0.5, 0.9])) == 20
    assert lag_report.steps_to(row(accuracies=[0.4, 0.79])) is None


def test_seeds_that_did_not_reach_the_goal_are_counted_and_not_averaged() -> None:
    cell = [
        row(accuracies=[0.4, 0.9]),
        row(accuracies=[0.4, 0.5, 0.6, 0.9]),
        row(accuracies=[0.4, 0.5]),
    ]
    assert lag_report.goal_cell(cell) == "20 (2,560), 2 of 3"
    assert lag_report.goal_cell(cell[2:]) == "0 of 1"


def test_lag_is_a_mean_over_tokens_and_steps_without_tokens_have_none() -> None:
    assert lag_report.seen_lag(row()) == pytest.approx((100 * 0.5 + 300 * 1.0) / 400)


def test_every_cell_of_the_table_is_computed_from_its_own_runs() -> None:
    rows = [
        row("AIPO", 0),
        row("AIPO", 8, accuracies=[0.4, 0.7]),
        row("PPO", 8, accuracies=[0.4, 0.1]),
    ]
    head, _, aipo, ppo = lag_report.table(
        rows, lambda cell: f"{lag_report.final(cell[0])}"
    ).splitlines()
    assert head == "| objective | max_lag 0 | max_lag 8 |"
    assert (aipo, ppo) == ("| AIPO | 0.9 | 0.7 |", "| PPO |  | 0.1 |")


def test_the_report_holds_runs_that_diverged_at_once(tmp_path: Path) -> None:
    empty = row(accuracies=[0.4]) | {
        "diverged_at": 0,
        "series": {name: [] for name in lag_sweep.SERIES},
    }
    assert "0.400 (0.358 to 0.444), 1 of 1 diverged" in lag_report.tables([empty])
    lag_report.draw([empty, row("PPO", 8)], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


# ---- mismatch


def test_differences_are_summarised_in_nats_and_small_ones_keep_their_kl() -> None:
    found = mismatch.summary(torch.tensor([1e-7, -3e-7, 2e-7]))
    assert found["mean"] == pytest.approx(0.0, abs=1e-13)
    assert found["max"] == pytest.approx(3e-7)
    assert found["q50"] == pytest.approx(2e-7)
    assert found["kl"] == pytest.approx((1e-14 + 9e-14 + 4e-14) / 2 / 3, rel=1e-3, abs=0)


def test_every_trained_token_is_watched_and_nothing_else(quickstart_policy: Path) -> None:
    policy, watch = mismatch.Watched(str(quickstart_policy), lr=0.0), mismatch.Watch()
    groups = [group(0, -2.0), group(1, -3.0)]
    quiet_trainer([watch]).fit(policy, MadeUp(groups))
    for step, one in enumerate(groups):
        own = [
            logprob
            for rollout in one.rollouts
            for logprob in policy.prompt_logprobs(one.prompt.token_ids + rollout.token_ids)[-3:]
        ]
        expected = [logprob - one.rollouts[0].logprobs[0] for logprob in own]
        assert sorted(watch.all[step].tolist()) == pytest.approx(sorted(expected), abs=1e-5)
    assert [step["tokens"] for step in watch.steps] == [6, 6]


def test_the_mismatch_table_has_a_cell_for_every_head() -> None:
    series = {name: [0.1] * 30 for name in ("std", "kl", "q50", "q99", "max")}
    whole = mismatch.summary(torch.tensor([0.1, -0.2]))
    line = {
        "dtype": "float32",
        "steps": 30,
        "accuracy": [0.4, 0.9],
        "whole": whole,
        "series": series,
    }
    head, _, cells = mismatch.table([line]).splitlines()
    assert head.count("|") == cells.count("|")
    assert "0 ± 0" in cells
