"""Refused features of Lightning by their row in docs/lightning.md: the trainer's settings, and
words of the error."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)

STEP = ("data.micro_batch_tokens", "data.groups_per_step")
EVALUATION = ("Evaluation.every_n_steps",)

Cases = dict[str, tuple[dict[str, Any], tuple[str, ...]]]

FLAGS: Cases = {
    "strategy (Lightning's own)": (
        {"devices": 1, "strategy": "auto"},
        ("SingleDeviceStrategy", "lrl.AsyncDDP"),
    ),
    "gradient_clip_val": (
        {"gradient_clip_val": 0.5},
        ("trainer.gradient_clip_val=0.5", "model.max_grad_norm"),
    ),
    "accumulate_grad_batches": (
        {"accumulate_grad_batches": 2},
        ("trainer.accumulate_grad_batches=2", *STEP),
    ),
    "precision=bf16-true, 16-true, 64-true, transformer-engine": (
        {"precision": "64-true"},
        ("trainer.precision='64-true'", "bf16-mixed", "model.dtype=bfloat16"),
    ),
    "val_check_interval": (
        {"val_check_interval": 5},
        ("trainer.val_check_interval=5", *EVALUATION),
    ),
    "check_val_every_n_epoch": (
        {"check_val_every_n_epoch": 2},
        ("trainer.check_val_every_n_epoch=2", *EVALUATION),
    ),
    "overfit_batches": (
        {"overfit_batches": 2},
        ("trainer.overfit_batches=2", "data.prompts.limit"),
    ),
    "num_nodes with AsyncSingleDevice": ({"num_nodes": 2}, ("trainer.num_nodes=2", "lrl.AsyncDDP")),
}

CALLBACKS: dict[str, tuple[L.Callback, str]] = {
    "GradientAccumulationScheduler": (GradientAccumulationScheduler({0: 2}), STEP[0]),
    "StochasticWeightAveraging": (StochasticWeightAveraging(1e-2), "the policy itself"),
    "WeightAveraging, EMAWeightAveraging": (WeightAveraging(), "the policy itself"),
    "BatchSizeFinder, Tuner.scale_batch_size": (BatchSizeFinder(), "data.micro_batch_tokens"),
    "LearningRateFinder, Tuner.lr_find": (LearningRateFinder(), "by reward or accuracy"),
    "ModelPruning": (ModelPruning("l1_unstructured"), "know them by their names"),
    "BackboneFinetuning": (BackboneFinetuning(), "a PolicyModule of your own"),
    "OnExceptionCheckpoint": (OnExceptionCheckpoint("."), "saves at a bad end by itself"),
    "SpikeDetection": (SpikeDetection(), "lrl.callbacks.Health"),
}

REFUSED: Cases = {
    **FLAGS,
    **{
        row: ({"callbacks": [callback]}, ("trainer.callbacks has", reason))
        for row, (callback, reason) in CALLBACKS.items()
    },
    "trainer.test": ({"verb": "test"}, ("trainer.test", "trainer.validate")),
    "trainer.predict": ({"verb": "predict"}, ("trainer.predict", "lrl chat")),
}
