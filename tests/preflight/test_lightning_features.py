"""Lightning's features that docs/lightning.md lists: what works and what is refused.

What works is shown by two runs on a real server that use all of it at once; what is refused is in
`bad_input.py`.

Covers lrl/preflight/settings.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler

import lrl
from lrl.callbacks import RolloutLog
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
    prompts: list[str]
    """Prompts of the groups in the order of their training."""
    steps: int
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
    prompts: list[str] = []

    def note(trainer: Any, *args: Any) -> None:
        prompts.extend(group.prompt.text for group in trainer.datamodule.run.step_stream.groups)

    callbacks = [*settings.pop("callbacks"), RolloutLog(), LambdaCallback(on_train_batch_end=note)]
    how = {"accelerator": "cpu", "devices": 2, "log_every_n_steps": 1, "default_root_dir": folder}
    trainer = L.Trainer(strategy=Borrowing(server), callbacks=callbacks, **how | settings)
    module, data = lrl.PolicyModule(str(policy), lr=1e-3), Data()
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return Run(folder, trainer, module, data, prompts=[*prompts], steps=trainer.global_step)


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
