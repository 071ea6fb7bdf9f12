"""Lightning's features that docs/lightning.md lists: what works and what is refused.

What works is shown by two runs on a real server that use all of it at once; what is refused is in
`bad_input.py`.

Covers lrl/preflight/settings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """Counts its loaders."""

    loaders = 0

    def __init__(self) -> None:
        super().__init__(
            *(PROMPTS, ["tests.odd_lengths:brevity"], 2, 2, 1),
            max_prompt_tokens=64,
            max_response_tokens=8,
        )

    def train_dataloader(self) -> Any:
        self.loaders += 1
        return super().train_dataloader()


Prompts = list[str]
Fit = Callable[..., tuple[L.Trainer, Prompts]]


@pytest.fixture(scope="module")
def fit(lent_server: LentServer, policy_folder: Path) -> Fit:
    """Fits in a folder with these settings; returns the trainer, and the prompts in the order of
    their training."""

    def run(
        folder: Path, ckpt_path: str | None = None, **settings: Any
    ) -> tuple[L.Trainer, Prompts]:
        prompts: Prompts = []

        def note(trainer: Any, *args: Any) -> None:
            groups = trainer.datamodule.run.step_stream.groups
            prompts.extend(group.prompt.text for group in groups)

        noting = LambdaCallback(on_train_batch_end=note)
        how = {"accelerator": "cpu", "devices": 2, "log_every_n_steps": 1, **settings}
        how["callbacks"] = [*settings["callbacks"], RolloutLog(), noting]
        trainer = L.Trainer(strategy=Borrowing(lent_server), default_root_dir=folder, **how)
        trainer.fit(lrl.PolicyModule(str(policy_folder), lr=1e-3), Data(), ckpt_path=ckpt_path)
        return trainer, prompts

    return run


@pytest.fixture(scope="module")
def first(fit: Fit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Prompts]]:
    folder = tmp_path_factory.mktemp("first")
    yield fit(
        folder,
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


def test_what_the_first_run_uses_works(first: tuple[Any, Prompts]) -> None:
    trainer, prompts = first
    folder, policy = Path(trainer.default_root_dir), trainer.lightning_module
    done = (trainer.current_epoch, trainer.global_step, trainer.datamodule.loaders)
    assert done == (2, 4, 2)
    assert len(set(prompts)) == len(prompts) == 8
    columns = next(folder.glob("csv/**/metrics.csv")).read_text()
    for metric in ("reward/mean", "policy/mismatch_kl", "lr-AdamW"):
        assert metric in columns
    assert any(folder.glob("board/**/events*"))
    saved = {path.name for path in folder.glob("csv/**/*.ckpt")}
    assert saved == {f"step={step}.ckpt" for step in range(1, 5)}
    trainer.save_checkpoint(folder / "mine.ckpt")
    loaded = lrl.PolicyModule.load_from_checkpoint(folder / "mine.ckpt", model=policy.model)
    weights = zip(policy.parameters(), loaded.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_a_run_that_names_its_checkpoint_last_stops_when_told_and_trains_no_prompt_twice(
    first: tuple[Any, Prompts], fit: Fit, tmp_path: Path
) -> None:
    """So does a second fit of its trainer, which is refused without a checkpoint."""

    def enough(trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = True

    saving = ModelCheckpoint(train_time_interval=timedelta(0), save_last=True)
    trainer, prompts = fit(
        tmp_path,
        ckpt_path="last",
        max_steps=9,
        min_steps=6,
        max_epochs=-1,
        logger=CSVLogger(Path(first[0].default_root_dir) / "csv"),
        enable_model_summary=False,
        plugins=[AsyncCheckpointIO()],
        callbacks=[RichProgressBar(), LambdaCallback(on_train_batch_end=enough), saving],
    )
    assert trainer.global_step == 6 and len(prompts) == 4
    assert Path(saving.last_model_path).exists()
    assert isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO)
    again = trainer.lightning_module, trainer.datamodule
    with pytest.raises(
        ValueError, match="has fitted 6 steps before .* continue with ckpt_path='last'"
    ):
        trainer.fit(*again)
    trainer.fit(*again, ckpt_path="last")
    assert trainer.global_step == 7
    every = first[1] + prompts
    assert len(set(every)) == len(every) == 14


def test_a_fast_run_in_mixed_precision_saves_nothing(fit: Fit, tmp_path: Path) -> None:
    settings = {"enable_progress_bar": False, "enable_model_summary": False, "callbacks": []}
    trainer, prompts = fit(tmp_path, fast_dev_run=1, precision="bf16-mixed", **settings)
    assert trainer.global_step == 1 and len(prompts) == 2
    assert not [*tmp_path.rglob("*.ckpt")]
