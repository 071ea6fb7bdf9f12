"""Sample responses in the loggers that have text or tables; stand-ins for the packages that are not
installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lrl.callbacks.samples import log_samples, sample
from lrl.types import Group, Prompt, Rollout


def group(columns: dict[str, Any], reward: float | None = 0.5, text: str = "it is 3") -> Group:
    first = Rollout(
        token_ids=[5] * 3, logprobs=[-1.0] * 3, versions=[7, 7, 9], finish_reason="stop", text=text
    )
    first.reward = reward
    first.reward_failure = None if reward is not None else "timeout"
    prompt = Prompt(id=4, token_ids=[1], text="1+1=", columns=columns)
    return Group(index=0, prompt=prompt, rollouts=[first, Rollout()])


SAMPLES = [
    sample(group({"answer": 2, "level": "easy"}), 10),
    sample(group({"gold": "two"}, None, ""), 10),
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


COLUMNS = [
    "step",
    "prompt id",
    "prompt",
    "answer",
    "response",
    "reward",
    "tokens",
    "finish reason",
    "versions",
]


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


def test_tensorboards_text_has_the_reference_answer(tmp_path: Path) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    log_samples(logger, SAMPLES, 10)
    logger.finalize("success")
    (event,) = EventAccumulator(str(tmp_path)).Reload().Tensors("rollouts/samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 10
    for part in (
        "**Prompt**\n\n    1+1=",
        "**Answer**\n\n    2",
        "**Response**\n\n    it is 3",
        "reward 0.5, 3 tokens",
    ):
        assert part in text


def test_half_a_surrogate_pair_is_shown_as_its_escape(tmp_path: Path) -> None:
    half = "half \ud83d"
    failed = group({"answer": half}, None, half)
    failed.rollouts[0].reward_failure = f"exception: {half}"
    shown = [sample(failed, 10), sample(group({half: half}), 10)]
    assert "\\ud83d" in shown[0]["answer"] and shown[1]["answer"] == r"half \ud83d: half \ud83d"
    logger = TensorBoardLogger(str(tmp_path), name="", version="")
    log_samples(logger, shown, 10)
    logger.finalize("success")
    (event,) = EventAccumulator(str(tmp_path)).Reload().Tensors("rollouts/samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text.count(r"half \ud83d") == 5


def test_a_logger_of_numbers_alone_is_left_alone(tmp_path: Path) -> None:
    log_samples(CSVLogger(str(tmp_path)), SAMPLES, 10)
    assert not list(tmp_path.rglob("*.csv"))
