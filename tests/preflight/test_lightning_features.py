"""Lightning's features that docs/lightning.md lists: what works and what is refused.

What works is shown by two runs on a real server that use all of it at once; what is refused never
gets to a server.

Covers lrl/preflight/settings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler

import lrl
from lrl.callbacks import RolloutLog
from lrl.generators.server import Server
from lrl.rewards import RewardPool
from tests.lent_server import Borrowing, LentServer

PROMPTS = [{"prompt": f"{n}+1="} for n in range(10, 50)]


class Data(lrl.RolloutDataModule):
    """Counts its loaders, and records the prompts of each step."""

    def __init__(self) -> None:
        super().__init__(
            *(PROMPTS, ["tests.odd_lengths:brevity"], 2, 2, 1),
            max_prompt_tokens=64,
            max_response_tokens=8,
        )
        self.loaders = 0

    def train_dataloader(self) -> Any:
        self.loaders += 1
        return super().train_dataloader()


@dataclass
class Run:
    """A finished run."""

    folder: Path
    trainer: L.Trainer
    policy: lrl.PolicyModule
    data: Data
    prompts: list[str] = field(default_factory=list)
    """Prompts of the groups in the order of their training."""
    steps: int = 0
    """The trainer's count at its end."""

    @property
    def columns(self) -> str:
        """Rows of the CSVLogger."""
        return next((self.folder / "csv").glob("**/metrics.csv")).read_text()

    @property
    def callbacks(self) -> list[Any]:
        return self.trainer.callbacks  # type: ignore[attr-defined]

    def saved(self, pattern: str = "**/*.ckpt") -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))


def fit(
    server: LentServer, policy: Path, folder: Path, ckpt_path: str | None = None, **settings: Any
) -> Run:
    noted: list[Run] = []

    def note(trainer: L.Trainer, *args: Any) -> None:
        run = noted[0].data.run
        assert run is not None
        stream = run.step_stream
        noted[0].prompts.extend(group.prompt.text for group in stream.groups)

    callbacks = [*settings.pop("callbacks"), RolloutLog(), LambdaCallback(on_train_batch_end=note)]
    how = {"accelerator": "cpu", "devices": 2, "log_every_n_steps": 1, "default_root_dir": folder}
    trainer = L.Trainer(strategy=Borrowing(server), callbacks=callbacks, **how | settings)
    noted.append(Run(folder, trainer, lrl.PolicyModule(str(policy), lr=1e-3), Data()))
    trainer.fit(noted[0].policy, noted[0].data, ckpt_path=ckpt_path)
    ended = noted[0]
    return replace(ended, prompts=[*ended.prompts], steps=trainer.global_step)


@pytest.fixture(scope="module")
def first(
    lent_server: LentServer, policy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("first")
    yield fit(
        *(lent_server, policy_folder, folder),
        limit_train_batches=2,
        max_epochs=2,
        min_epochs=1,
        reload_dataloaders_every_n_epochs=1,
        detect_anomaly=True,
        deterministic=True,
        benchmark=False,
        use_distributed_sampler=False,
        profiler=SimpleProfiler(dirpath=folder, filename="times"),
        max_time="01:00:00:00",
        logger=[CSVLogger(folder / "csv"), TensorBoardLogger(folder / "board")],
        callbacks=[
            *(TQDMProgressBar(), LearningRateMonitor(), DeviceStatsMonitor(cpu_stats=True)),
            *(ModelSummary(), ThroughputMonitor(lambda step: step.num_sequences, window_size=2)),
            Timer(),
            ModelCheckpoint(every_n_train_steps=1, save_top_k=-1, filename="{step}"),
        ],
    )
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def second(
    first: Run,
    lent_server: LentServer,
    policy_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    def enough(trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = True

    return fit(
        *(lent_server, policy_folder, tmp_path_factory.mktemp("second")),
        ckpt_path="last",
        max_steps=9,
        min_steps=6,
        max_epochs=-1,
        logger=CSVLogger(first.folder / "csv"),
        enable_model_summary=False,
        plugins=[AsyncCheckpointIO()],
        callbacks=[
            *(RichProgressBar(), LambdaCallback(on_train_batch_end=enough)),
            ModelCheckpoint(train_time_interval=timedelta(0), save_last=True),
        ],
    )


def test_what_the_first_run_uses_works(first: Run) -> None:
    assert (first.trainer.current_epoch, first.steps, first.data.loaders) == (2, 4, 2)
    assert len(set(first.prompts)) == len(first.prompts) == 8
    for metric in ("reward/mean", "policy/mismatch_kl", "lr-AdamW"):
        assert metric in first.columns
    assert any(first.folder.glob("board/**/events*"))
    assert first.saved("csv/**/*.ckpt") == [f"step={step}.ckpt" for step in range(1, 5)]
    path = first.folder / "mine.ckpt"
    first.trainer.save_checkpoint(path)
    loaded = lrl.PolicyModule.load_from_checkpoint(path, model=first.policy.model)
    weights = zip(first.policy.parameters(), loaded.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_a_run_that_names_its_checkpoint_last_stops_when_told_and_trains_no_prompt_twice(
    first: Run, second: Run
) -> None:
    assert second.steps == 6 and len(second.prompts) == 4
    assert Path(second.callbacks[-1].last_model_path).exists()
    assert isinstance(second.trainer.strategy.checkpoint_io, AsyncCheckpointIO)
    assert not set(first.prompts) & set(second.prompts)


def test_a_fast_run_in_mixed_precision_saves_nothing(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    settings = {"enable_progress_bar": False, "enable_model_summary": False, "callbacks": []}
    how = {"fast_dev_run": 1, "precision": "bf16-mixed"} | settings
    run = fit(lent_server, policy_folder, tmp_path, **how)
    assert run.steps == 1 and not run.saved() and len(run.prompts) == 2


def test_a_second_fit_of_one_trainer_is_refused_or_resumes_from_its_checkpoint(second: Run) -> None:
    with pytest.raises(
        ValueError, match="has fitted 6 steps before .* continue with ckpt_path='last'"
    ):
        second.trainer.fit(second.policy, second.data)
    second.trainer.fit(second.policy, second.data, ckpt_path="last")
    assert second.trainer.global_step == 7
    assert second.data.run is not None
    groups = second.data.run.step_stream.groups
    assert not {group.prompt.text for group in groups} & set(second.prompts)


REFUSED: list[tuple[dict[str, Any], *tuple[str, ...]]] = [
    ({"devices": 1, "strategy": "auto"}, "SingleDeviceStrategy", "lrl.AsyncDDP"),
    ({"precision": "64-true"}, "trainer.precision='64-true'", "bf16-mixed", "model.dtype=bfloat16"),
    ({"num_nodes": 2}, "trainer.num_nodes=2", "lrl.AsyncDDP"),
    ({"verb": "test"}, "trainer.test", "trainer.validate"),
    ({"verb": "predict"}, "trainer.predict", "lrl chat"),
    ({"gradient_clip_val": 0.5}, "trainer.gradient_clip_val=0.5", "model.max_grad_norm"),
    ({"accumulate_grad_batches": 2}, "data.groups_per_step"),
    ({"val_check_interval": 5}, "Evaluation.every_n_steps"),
    ({"check_val_every_n_epoch": 2}, "Evaluation.every_n_steps"),
    ({"overfit_batches": 2}, "data.prompts.limit"),
    *(
        ({"callbacks": [one]}, f"trainer.callbacks has {type(one).__name__}")
        for one in (
            *(GradientAccumulationScheduler({0: 2}), StochasticWeightAveraging(1e-2)),
            *(WeightAveraging(), BatchSizeFinder(), LearningRateFinder()),
            *(ModelPruning("l1_unstructured"), BackboneFinetuning(), OnExceptionCheckpoint(".")),
            SpikeDetection(),
        )
    ),
]
"""What would be ignored or wrong: the trainer's settings, and words of the error."""


@pytest.fixture
def refused(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs a trainer that must not reach a server; returns the error."""
    monkeypatch.setattr(Server, "start", lambda server: pytest.fail("a server was started"))
    monkeypatch.setattr(RewardPool, "start", lambda *_: None)
    monkeypatch.chdir(tmp_path)  # OnExceptionCheckpoint saves what is refused

    def run(verb: str = "fit", **settings: Any) -> str:
        how = {"accelerator": "cpu", "devices": 2, "max_steps": 4, "logger": False}
        trainer = L.Trainer(**{"strategy": lrl.AsyncSingleDevice()} | how | settings)
        with pytest.raises(ValueError) as caught:
            getattr(trainer, verb)(lrl.PolicyModule(str(policy_folder)), Data())
        return str(caught.value)

    return run


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[1])
def test_what_would_be_ignored_or_wrong_is_refused(row: Any, refused: Callable[..., str]) -> None:
    settings, *named = row
    message = refused(**settings)
    assert all(name in message for name in named), message
