"""The last page of a run: where each logger has its metrics."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lrl.callbacks.summary import where_metrics_are


def test_each_logger_says_where_its_metrics_are(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path / "a b"), CSVLogger(tmp_path / "c")]
    lines = where_metrics_are(L.Trainer(logger=loggers, accelerator="cpu"))
    assert lines[0].split(maxsplit=1)[1] == f"tensorboard --logdir '{loggers[0].log_dir}'"
    assert lines[1].split() == ["metrics", f"{loggers[1].log_dir}/metrics.csv"]
