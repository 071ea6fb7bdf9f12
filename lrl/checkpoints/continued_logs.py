"""The logs of a folder that a run goes on with: what is there stays, and no step is there twice."""

import csv
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def continue_logs(trainer: L.Trainer, step: int) -> None:
    """Has the loggers keep what their folders have, but for the steps from `step` on, which the run
    trains again; all of it, if that is below 0."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            _continue_csv(logger, step)
        elif isinstance(logger, TensorBoardLogger) and step >= 0:
            _forget_events(logger, step)


def _continue_csv(logger: CSVLogger, step: int) -> None:
    """Writes the kept rows into a new file: Lightning removes the one that it finds."""
    path = Path(logger.log_dir, "metrics.csv")
    if not path.exists():
        return
    with path.open(newline="") as file:
        # A line that a crash cut short lacks its last values.
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    logger._experiment = None
    logger.experiment.metrics = [row for row in rows if step < 0 or int(row["step"]) < step]
    logger.save()


def _forget_events(logger: TensorBoardLogger, step: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = SessionLog(status=SessionLog.START)
    writer = logger.experiment._get_file_writer()  # opens it again after an earlier fit
    writer.add_event(Event(step=step, session_log=start))
