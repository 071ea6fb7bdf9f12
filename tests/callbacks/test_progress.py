"""Progress of a run in a terminal of 80 columns, and without one."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
import struct
import sys
import threading
from fcntl import ioctl
from termios import TIOCSWINSZ
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.callbacks import Progress, Throughput
from lrl.callbacks.throughput import StepTimes
from tests.callbacks import scripted


class Measured(Throughput):
    """The times of steps of which a quarter was waiting, with groups that end in each fifth."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """There is no data module whose times could begin."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        tokens = 0 if trainer.global_step % 5 else 246_912
        seconds = {"train": 3.0, "wait_first": 0.8, "transfer": 0.2}
        self.times = StepTimes(seconds, generated_tokens=tokens)


def fit(progress: L.Callback, steps: int) -> None:
    """A run with a reward and, but for the first step, a lag; something is said in the second."""
    rows = [{"reward/mean": 0.5}, *[{"reward/mean": 0.5, "policy/lag_mean": 0.25}] * (steps - 1)]
    scripted.fit(rows, Measured(), Speaks(), progress, enable_progress_bar=True)


class Speaks(L.Callback):
    """Says something in the second step."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            rank_zero_info("said by Lightning")
            logging.getLogger("lrl.of_a_test").warning("said by lrl")


class Terminal:
    """A terminal of a number of columns in the place of stderr, whose reader never waits."""

    def __init__(self, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reads, here = pty.openpty()
        ioctl(here, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._stream = os.fdopen(here, "w")
        self._written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        monkeypatch.setattr(sys, "stderr", self._stream)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while read := os.read(self._reads, 65536):
                self._written += read

    def close(self) -> list[str]:
        """Returns what stood in each line at last."""
        self._stream.close()
        self._reader.join()
        os.close(self._reads)
        text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", self._written.decode())
        return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]


@pytest.mark.parametrize("columns", [80, 160])
def test_a_narrow_terminal_keeps_reward_lag_and_waits_and_what_is_logged_stands_above_the_bar(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal(columns, monkeypatch)
    handler = logging.StreamHandler(sys.stderr)  # as Lightning's, which was made before
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "handlers", [handler])
    fit(Progress(), 12)
    lines = terminal.close()
    (place,) = (number for number, line in enumerate(lines) if line.startswith("step"))
    assert lines[place].startswith("step 12/12 |") and len(lines[place]) <= columns
    assert "reward 0.500, lag 0.2, waited 25%" in lines[place]
    assert ("rollouts 20%, sync 5%" in lines[place]) == (columns >= 160)
    assert max(lines.index("said by Lightning"), lines.index("said by lrl")) < place


def test_without_a_terminal_there_is_a_line_every_few_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(Progress(every_n_steps=5), 12)
    lines = [message for message in caplog.messages if message.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == [f"step {n}/12" for n in (1, 5, 10, 12)]
    assert "lag" not in lines[0], "it was not logged, and nan says nothing"
    what = (
        "reward 0.500, lag 0.2, waited 25%, 12,346 tok/s, 4.0 s/step, waits: rollouts 20%, sync 5%"
    )
    assert re.fullmatch(rf"step 5/12: {re.escape(what)}, \d\d:\d\d left", lines[1])
    assert "\r" not in stream.getvalue()


def test_a_rank_without_the_times_of_a_step_writes_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(every_n_steps=1)
    progress.disable()  # as Lightning does on all ranks but the first
    scripted.fit([{"reward/mean": 0.5}], progress, enable_progress_bar=True)
    assert "step 1" not in capfd.readouterr().err
