"""Output of `RolloutLog`: counts, and samples."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lrl.callbacks import RolloutLog
from lrl.callbacks.rollout_log import log_samples, sample, scalars
from lrl.types import ENVIRONMENT, Group, Rollout
from tests import made
from tests.callbacks.scripted import fit


def response(versions: list[int]) -> Rollout:
    return made.rollout(len(versions), 1.0, versions=versions)


class Steps(L.LightningDataModule):
    """The parts of each step that `RolloutLog` reads: one response, and the given number of
    failures."""

    def __init__(self, failures: list[int]) -> None:
        super().__init__()
        self.failures = failures
        self.environment = None
        controller = SimpleNamespace(ledger=SimpleNamespace(skipped=[]))
        self.run = SimpleNamespace(data=self, calls=SimpleNamespace(controller=controller))
        self.reward_pool = SimpleNamespace(
            counts=Counter(), workers=SimpleNamespace(members=SimpleNamespace(ready=[]))
        )

    def train_dataloader(self) -> list[int]:
        return list(range(len(self.failures)))

    def begin(self, step: int) -> None:
        failed, group = self.failures[step], made.group(step, response([step]))
        self.reward_pool.counts["crash"] += failed
        counts = {"discarded_rollouts": failed, "masked_tokens": 0, "padding": 0.0, "shared": 0.0}
        stream = {"groups": [group], "packer": SimpleNamespace(**counts), "replayed": []}
        self.run.step_stream = SimpleNamespace(step=step, **stream)


class Times(L.Callback):
    """Stands behind `RolloutLog`, as `Throughput` may."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: int, _: int) -> None:
        trainer.datamodule.begin(batch)  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        pl_module.log("time/wait", 0.5, batch_size=1)


def written(folder: Path, failures: list[int]) -> EventAccumulator:
    """Returns the TensorBoard events of a run with one step for each of `failures`."""
    logger = TensorBoardLogger(str(folder), name="", version="")
    rows = [{"policy/ess": 0.9}] * len(failures)  # and nothing about lag
    fit(rows, RolloutLog(), Times(), data=Steps(failures), logger=logger)
    return EventAccumulator(str(folder)).Reload()


def test_a_count_is_logged_from_its_first_nonzero_value_on(tmp_path: Path) -> None:
    events = written(tmp_path, [0, 2, 0, 1])
    series = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert series["rollouts/discarded"] == [(1, 2.0), (2, 0.0), (3, 1.0)]
    assert series["rewards/crash"] == [(1, 2.0), (2, 2.0), (3, 3.0)]
    assert not {"rollouts/masked_tokens", "rollouts/skipped_groups", "rewards/timeout"} & {*series}


def test_lengths_and_shares_are_of_what_the_policy_wrote() -> None:
    played = response([3, ENVIRONMENT, ENVIRONMENT, 4])
    played.turn_ends = [1, 4]
    played.finish_reason = "turns"
    whole = response([4, 4])
    whole.turn_ends = [2]
    found = scalars([played, whole])
    assert found["rollouts/length_mean"] == 2.0 and found["rollouts/truncated"] == 0.5
    assert (found["episodes/turns"], found["episodes/turn_limit"]) == (1.5, 0.5)
    assert found["episodes/token_limit"] == 0.0
    assert "episodes/turns" not in scalars([response([4])])


def sampled(columns: dict[str, Any], reward: float | None = 0.5, text: str = "it is 3") -> Group:
    failure = None if reward is not None else "timeout"
    first = made.rollout(3, reward, versions=[7, 7, 9], text=text, reward_failure=failure)
    return made.group(4, first, Rollout(), text="1+1=", columns=columns)


SAMPLES = [
    sample(sampled({"answer": 2, "level": "easy"}), 10),
    sample(sampled({"gold": "two"}, None, ""), 10),
]


class Wandb(WandbLogger):
    def __init__(self) -> None:
        self.tables: list[Any] = []

    def log_table(self, *table: Any, step: int | None = None, **_: Any) -> None:
        self.tables.append((*table, step))


class MLflow(MLFlowLogger):
    experiment: Any = None
    run_id = "run"

    def __init__(self) -> None:
        self.tables: list[Any] = []
        self.experiment = SimpleNamespace(log_table=lambda *table: self.tables.append(table))


COLUMNS = ["step", "prompt id", "prompt", "answer", "response", "reward", "tokens"]
COLUMNS += ["finish reason", "versions"]


def test_a_tracker_with_tables_gets_a_row_for_each_sample_with_the_reference_answer() -> None:
    wandb, mlflow = Wandb(), MLflow()
    for logger in (wandb, mlflow):
        log_samples(logger, SAMPLES, 10)
    rows = [
        [10, 4, "1+1=", "2", "it is 3", "0.5", 3, "stop", "7, 9"],
        [10, 4, "1+1=", "gold: two", "", "timeout", 3, "stop", "7, 9"],
    ]
    assert wandb.tables == [("rollouts/samples", COLUMNS, rows, 10)]
    as_columns = {name: [row[number] for row in rows] for number, name in enumerate(COLUMNS)}
    assert mlflow.tables == [("run", as_columns, "rollouts/samples/step000010.json")]


def text_of(folder: Path, shown: list[dict[str, Any]]) -> str:
    """TensorBoard's text of these samples."""
    logger = TensorBoardLogger(str(folder), name="", version="")
    log_samples(logger, shown, 10)
    logger.finalize("success")
    (event,) = EventAccumulator(str(folder)).Reload().Tensors("rollouts/samples/text_summary")
    assert event.step == 10
    return event.tensor_proto.string_val[0].decode()


def test_tensorboards_text_has_the_reference_answer_and_half_a_surrogate_pair_as_its_escape(
    tmp_path: Path,
) -> None:
    text = text_of(tmp_path / "usual", SAMPLES)
    for line in ("prompt: 1+1=", "answer: 2", "response: it is 3", "reward: 0.5"):
        assert f"    {line}\n" in text
    half = "half \ud83d"
    shown = [sample(sampled({half: half}, text=half), 10)]
    assert text_of(tmp_path / "odd", shown).count(r"half \ud83d") == 3
