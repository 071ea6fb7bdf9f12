"""Lightning's features: what works and what is refused, row by row of docs/lightning.md.

What works is shown by two runs on a real server that use all of it at once; what is refused never
gets to a server.

Covers lrl/preflight/settings.py.
"""

from __future__ import annotations

import re
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

DOCS = Path(__file__).parents[2] / "docs" / "lightning.md"
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
            *(
                TQDMProgressBar(),
                LearningRateMonitor(),
                DeviceStatsMonitor(cpu_stats=True),
                ModelSummary(),
            ),
            *(ThroughputMonitor(lambda step: step.num_sequences, window_size=2), Timer()),
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


@pytest.fixture(scope="module")
def quick(
    lent_server: LentServer, policy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    settings = {"enable_progress_bar": False, "enable_model_summary": False, "callbacks": []}
    return fit(
        lent_server,
        policy_folder,
        tmp_path_factory.mktemp("quick"),
        fast_dev_run=1,
        precision="bf16-mixed",
        **settings,
    )


def loads(run: Run) -> bool:
    path = run.folder / "mine.ckpt"
    run.trainer.save_checkpoint(path)
    loaded = lrl.PolicyModule.load_from_checkpoint(path, model=run.policy.model)
    weights = zip(run.policy.parameters(), loaded.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in weights)


FIRST: dict[str, Callable[[Run], bool]] = {
    "max_epochs, max_steps": lambda run: (run.trainer.current_epoch, run.steps) == (2, 4),
    "limit_train_batches": lambda run: len(set(run.prompts)) == len(run.prompts) == 8,
    "reload_dataloaders_every_n_epochs": lambda run: run.data.loaders == 2,
    "logger (any, several, False)": lambda run: (
        "reward/mean" in run.columns and any(run.folder.glob("board/**/events*"))
    ),
    "LearningRateMonitor": lambda run: "lr-AdamW" in run.columns,
    "ModelCheckpoint(every_n_train_steps, save_top_k)": lambda run: (
        run.saved("csv/**/*.ckpt") == [f"step={step}.ckpt" for step in range(1, 5)]
    ),
    "LambdaCallback and callbacks of one's own": lambda run: len(run.prompts) == 8,
    "callbacks without WeightSync": lambda run: "policy/mismatch_kl" in run.columns,
    "trainer.save_checkpoint, load_from_checkpoint": loads,
}

SECOND: dict[str, Callable[[Run], bool]] = {
    'ckpt_path="last"': lambda run: len(run.prompts) == 4,
    "min_steps, min_epochs, trainer.should_stop": lambda run: run.steps == 6,
    "ModelCheckpoint(train_time_interval, save_last)": lambda run: Path(
        run.callbacks[-1].last_model_path
    ).exists(),
    "plugins (CheckpointIO)": lambda run: isinstance(
        run.trainer.strategy.checkpoint_io, AsyncCheckpointIO
    ),
}

QUICK: dict[str, Callable[[Run], bool]] = {
    "fast_dev_run": lambda run: run.steps == 1 and not run.saved() and len(run.prompts) == 2,
    "precision=bf16-mixed, 32-true": lambda run: run.trainer.precision == "bf16-mixed",
}

IN_USE = (
    *("profiler", "max_time, Timer", "use_distributed_sampler", "DeviceStatsMonitor"),
    *("ThroughputMonitor", "ModelSummary, RichModelSummary", "TQDMProgressBar", "RichProgressBar"),
    *("detect_anomaly", "deterministic, benchmark"),
)
"""Rows that the runs use, and that are Lightning's own."""

ELSEWHERE = (
    "trainer.validate",  # tests/runs/test_recipes.py
    "ModelCheckpoint(monitor)",  # tests/callbacks/test_monitors.py
    "EarlyStopping",  # tests/callbacks/test_monitors.py
    "configure_optimizers of one's own",  # tests/training/test_optimizers.py
    "enable_checkpointing=False",  # tests/callbacks/test_last_checkpoint.py
    "several devices (lrl.AsyncDDP)",  # tests/strategies/test_ranks_run.py
)
"""Rows that other tests hold."""


RUNS = {"first": FIRST, "second": SECOND, "quick": QUICK}


@pytest.mark.parametrize(("run", "row"), [(run, row) for run, rows in RUNS.items() for row in rows])
def test_it_works(run: str, row: str, request: pytest.FixtureRequest) -> None:
    assert RUNS[run][row](request.getfixturevalue(run))


def test_no_prompt_is_trained_twice_when_the_newest_checkpoint_is_named_last(
    first: Run, second: Run
) -> None:
    assert not set(first.prompts) & set(second.prompts)


SECOND_FIT = "trainer.fit twice"


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


FLAGS = [
    ("gradient_clip_val", 0.5, "model.max_grad_norm"),
    ("accumulate_grad_batches", 2, "data.micro_batch_tokens and data.groups_per_step"),
    ("val_check_interval", 5, "Evaluation.every_n_steps"),
    ("check_val_every_n_epoch", 2, "Evaluation.every_n_steps"),
    ("overfit_batches", 2, "data.prompts.limit"),
]
CALLBACKS: dict[str, tuple[L.Callback, str]] = {
    "GradientAccumulationScheduler": (
        GradientAccumulationScheduler({0: 2}),
        "data.micro_batch_tokens",
    ),
    "StochasticWeightAveraging": (StochasticWeightAveraging(1e-2), "the policy itself"),
    "WeightAveraging, EMAWeightAveraging": (WeightAveraging(), "the policy itself"),
    "BatchSizeFinder, Tuner.scale_batch_size": (BatchSizeFinder(), "data.micro_batch_tokens"),
    "LearningRateFinder, Tuner.lr_find": (LearningRateFinder(), "by reward or accuracy"),
    "ModelPruning": (ModelPruning("l1_unstructured"), "know them by their names"),
    "BackboneFinetuning": (BackboneFinetuning(), "a PolicyModule of your own"),
    "OnExceptionCheckpoint": (
        OnExceptionCheckpoint("."),
        "saves by itself when an error or a signal ends it",
    ),
    "SpikeDetection": (SpikeDetection(), "lrl.callbacks.Health"),
}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "strategy (Lightning's own)": (
        {"devices": 1, "strategy": "auto"},
        ("SingleDeviceStrategy", "lrl.AsyncDDP"),
    ),
    "precision=bf16-true, 16-true, 64-true, transformer-engine": (
        {"precision": "64-true"},
        ("trainer.precision='64-true'", "bf16-mixed", "model.dtype=bfloat16"),
    ),
    "num_nodes with AsyncSingleDevice": ({"num_nodes": 2}, ("trainer.num_nodes=2", "lrl.AsyncDDP")),
    "trainer.test": ({"verb": "test"}, ("trainer.test", "trainer.validate")),
    "trainer.predict": ({"verb": "predict"}, ("trainer.predict", "lrl chat")),
    **{flag: ({flag: value}, (f"trainer.{flag}={value}", remedy)) for flag, value, remedy in FLAGS},
    **{
        row: ({"callbacks": [callback]}, ("trainer.callbacks has", reason))
        for row, (callback, reason) in CALLBACKS.items()
    },
}
"""The rows of docs/lightning.md that are refused: the trainer's settings, and words of the error."""


@pytest.fixture
def refused(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs a trainer that must not reach a server; returns the error."""
    monkeypatch.setattr(Server, "start", lambda server: pytest.fail("a server was started"))
    monkeypatch.setattr(RewardPool, "start", lambda pool, first=None: None)
    monkeypatch.chdir(tmp_path)  # OnExceptionCheckpoint saves what is refused

    def run(verb: str = "fit", **settings: Any) -> str:
        how = {
            "accelerator": "cpu",
            "devices": 2,
            "max_steps": 4,
            "logger": False,
            "default_root_dir": tmp_path,
        }
        trainer = L.Trainer(**{"strategy": lrl.AsyncSingleDevice()} | how | settings)
        with pytest.raises(ValueError) as caught:
            getattr(trainer, verb)(lrl.PolicyModule(str(policy_folder)), Data())
        return str(caught.value)

    return run


@pytest.mark.parametrize("row", REFUSED)
def test_what_would_be_ignored_or_wrong_is_refused(row: str, refused: Callable[..., str]) -> None:
    settings, named = REFUSED[row]
    message = refused(**settings)
    assert all(name in message for name in named), message


def documented() -> dict[str, str]:
    """Returns the rows of the page's tables, with `works` or `refused`."""
    lines = re.findall(r"^\| `(.+?)` \| (works|refused) \|", DOCS.read_text(), re.MULTILINE)
    return dict(lines)


def test_the_table_agrees_with_the_tests() -> None:
    works = [*FIRST, *SECOND, *QUICK, *IN_USE, *ELSEWHERE]
    message = documented()
    assert {row for row, verdict in message.items() if verdict == "works"} == set(works)
    refused = {row for row, verdict in message.items() if verdict == "refused"}
    assert refused == {*REFUSED, SECOND_FIT}
