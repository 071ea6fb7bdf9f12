"""Both sides at once, without data between them: generation without training, and training on
responses that are there.

Each is a separate process, with its threads of an asynchronous run, and each waits for the other at
every step's end. Nothing else goes between them. So the machine causes the difference to training
alone; lrl causes the difference of an asynchronous step to such a step.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L

from benchmarks import timed_run
from benchmarks.lent_server import LentServer
from benchmarks.ready_responses import train_alone
from benchmarks.timed_run import System, Timed
from lrl.planning.simulator.length_sampling import LengthSampler

PATIENCE_S = 300.0
"""Seconds to wait for a step of the other side."""


def both_at_once(
    system: System,
    server: LentServer,
    policy: Path,
    lengths: LengthSampler,
    counted: int,
    folder: Path,
    warm_up: int,
) -> tuple[list[float], list[Timed]]:
    """Returns, for the counted steps, the seconds of both sides, and the times of the training
    side.

    Raises:
        RuntimeError: The other process ended early, or takes longer than `PATIENCE_S` for a step.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    steps = warm_up + counted
    trains = context.Process(
        target=train_for, args=(there, system, policy, lengths, steps, folder), daemon=True
    )
    trains.start()
    there.close()  # so that its end is heard here
    pace = AtThePaceOf(here, steps)
    takes = replace(system, trains=False)
    try:
        timed_run.run(takes, server, policy, lengths, counted, folder, warm_up, first=[pace])
    finally:
        trains.terminate()
        trains.join()
    return pace.seconds[warm_up:], pace.times[warm_up:]


def train_for(
    other: Connection,
    system: System,
    policy: Path,
    lengths: LengthSampler,
    steps: int,
    folder: Path,
) -> None:
    """Trains so many steps alone, from the first response of the other side; reports each step to
    it."""
    train_alone(system, policy, lengths, steps, folder, Tells(other))


class Tells(L.Callback):
    """Begins each step together with the other side, and sends it the duration of the last one.

    Args:
        other: The side that writes.
    """

    def __init__(self, other: Connection) -> None:
        self.other = other

    def on_train_start(self, *args: Any) -> None:
        """Waits until the servers have their first weights and write."""
        heard(self.other)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Waits for the other side."""
        self.other.send(trainer.datamodule.supervisor.times[-1])  # type: ignore[attr-defined]
        heard(self.other)


class AtThePaceOf(L.Callback):
    """Begins each step together with the training side. Put it first.

    Args:
        other: The side that trains.
        steps: That it trains; later ones do not wait.
    """

    def __init__(self, other: Connection, steps: int) -> None:
        self.other = other
        self.left = steps
        self.seconds: list[float] = []
        self.times: list[Timed] = []

    def on_train_start(self, *args: Any) -> None:
        """Reports that this side writes."""
        self.other.send(None)
        self._began = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        """Waits for the other side."""
        if self.left:
            self.left -= 1
            self.other.send(None)
            self.times.append(heard(self.other))
            now = time.perf_counter()
            self.seconds.append(now - self._began)
            self._began = now


def heard(other: Connection) -> Any:
    """Returns the next message of the other side.

    Raises:
        RuntimeError: It said nothing for `PATIENCE_S`, or has ended.
    """
    try:
        if other.poll(PATIENCE_S):
            return other.recv()
    except EOFError:
        raise RuntimeError(
            "The other side of a run with both at once has ended early; its log is above."
        ) from None
    raise RuntimeError(
        f"The other side of a run with both at once said nothing for {PATIENCE_S:g} s."
    )
