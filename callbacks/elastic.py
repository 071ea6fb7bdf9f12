"""Says when the run would gain from one more generator, and starts one if it is told how.

StreamRL's rule (2504.15930, elastic adjustment): with delta = T_gen - T_train, and delta' the time that one more unit
would take off the generation, add one when delta >= delta'. Here a unit is a generator, and of a step's seconds

    T_train = step - wait                  the trainer had something to do
    T_gen   = step * (1 - idle)            the generators had; idle is the mean of their idle and starved shares
    delta'  = T_gen - T_gen * n / (n + 1)  n generators share the work evenly, and one more takes its part of it
            = T_gen / (n + 1)

so that delta is the time the trainer waited less the time the generators idled. The paper leaves delta' to a profile of
the model; the even share is the simplest one, and says too much where one long response holds a step: there the
generators idle meanwhile, which makes delta small. The paper has no rule for one generator less. Ours is the same
turned round: T_gen * n / (n - 1) <= T_train. It is only said.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import lightning as L

from lrl.callbacks.base import OnRankZero, find
from lrl.callbacks.throughput import StepTimes, Throughput
from lrl.generators.fleet import Fleet
from lrl.runtime.config_errors import ConfigError, at_least, fault
from lrl.runtime.run_folder import run_folder
from lrl.runtime.stopwatch import GENERATOR, shares

log = logging.getLogger(__name__)

RUN = "{run}"
JOIN = f"lrl serve --join {RUN}"
END_S = 10.0
"""Seconds that what was started has to end after each signal."""


class Elastic(OnRankZero):
    """Asks for one more generator by StreamRL's rule.

    Args:
        command: What starts one, as words for a shell, `{run}` for the run's folder: `lrl serve --join {run}`, or a
            scheduler's command that has it run elsewhere. Null only says that one would help.
        max_generators: Most generators that write rollouts; null for no limit.
        steps: Steps in a row for which the rule has to hold.

    Raises:
        ValueError: A number is below 1, or the command does not begin with a program.
    """

    def __init__(self, command: str | None = None, max_generators: int | None = None, steps: int = 3) -> None:
        at_least(1, "Elastic", steps=steps, max_generators=max_generators)
        if command is not None and shutil.which((shlex.split(command) or [""])[0]) is None:
            fault(
                f"Elastic.command is {command!r}, which does not begin with a program on the path: give the words that "
                f"start a generator ({JOIN}), or null."
            )
        self.command, self.max_generators, self.steps = command, max_generators, steps
        self._more = self._fewer = 0  # steps in a row
        self._started: list[subprocess.Popen[bytes]] = []
        self._joined_before = 0  # by then, when the last one was started

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raises ValueError if there is nobody to measure the steps."""
        if find(trainer, Throughput) is None:
            raise ConfigError(
                "trainer.callbacks has lrl.callbacks.Elastic without lrl.callbacks.Throughput, whose times it judges. "
                "Add it."
            )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Judge the step that has just ended."""
        throughput, fleet = find(trainer, Throughput), trainer.datamodule.fleet  # type: ignore[attr-defined]
        assert throughput is not None, "looked for in setup"
        times, generators = throughput.times, len(fleet.rollouts.alive)
        self._more = self._more + 1 if lacks_one(times, generators) else 0
        self._fewer = self._fewer + 1 if has_one_too_many(times, generators) else 0
        run = run_folder(trainer)
        if self._more == self.steps:
            self._more = 0 if self.command else self._more  # what is only said is said once
            self._ask(fleet, run, generators, times)
        if self._fewer == self.steps:
            log.warning(
                "%d generators write faster than the trainer trains: one less would do. Type: lrl serve --leave %s",
                generators,
                run,
            )

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """End what was started: Lightning does not call `teardown` after an error."""
        self._end()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """End what was started; a generator that it has had join elsewhere notices the end of the run by itself."""
        self._end()

    def _ask(self, fleet: Fleet, run: Path, generators: int, times: StepTimes) -> None:
        """Say that one more would help, and start it, unless there are enough or one is on its way."""
        if self.max_generators is not None and generators >= self.max_generators:
            return
        command = (self.command or JOIN).replace(RUN, shlex.quote(str(run)))
        what = f"One more generator would help: of {times.step:.1f} s a step the trainer waited {times.wait:.1f} s"
        if self.command is None:
            log.warning("%s, and %d cannot write faster. Type: %s", what, generators, command)
        elif not self._one_is_coming(fleet):
            log.warning("%s, and %d cannot write faster. Starting: %s", what, generators, command)
            self._joined_before = fleet.joined
            try:
                self._started.append(subprocess.Popen(shlex.split(command), start_new_session=True))
            except OSError as error:
                log.warning("It cannot be started: %s", error)

    def _one_is_coming(self, fleet: Fleet) -> bool:
        """Whether the last one that was started has not joined yet, and may: its command has not failed."""
        if not self._started or fleet.joined > self._joined_before:
            return False
        status = self._started[-1].poll()
        if status:
            log.warning("The last one has failed (Elastic.command %r, exit status %d).", self.command, status)
        return not status

    def _end(self) -> None:
        """Signals to all that was started: to leave the run, to end now, SIGKILL; to each as long as it is there."""
        running = [process for process in self._started if process.poll() is None]
        self._started.clear()
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            running = [process for process in running if process.poll() is None]


def generation_s(times: StepTimes) -> float:
    """T_gen: seconds of a step in which the generators had something to do."""
    its = shares(times.generators, GENERATOR)
    return times.step * (1.0 - its["idle"] - its["starved"])


def lacks_one(times: StepTimes, generators: int) -> bool:
    """Whether generation is slower than training by what one more of `generators` would take off it, or more."""
    return generation_s(times) - (times.step - times.wait) >= generation_s(times) / (generators + 1)


def has_one_too_many(times: StepTimes, generators: int) -> bool:
    """Whether one less of `generators` would still write as fast as the trainer trains."""
    return generators > 1 and generation_s(times) * generators / (generators - 1) <= times.step - times.wait
