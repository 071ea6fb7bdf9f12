"""Advice when the run would gain from one more generator, and a command that starts one.

StreamRL's rule (2504.15930, elastic adjustment) adds a unit when delta = T_gen - T_train is at least
delta', the time that it would take off the generation. Here, of a step's seconds,

    T_train = step - wait            the trainer is busy
    T_gen   = step * (1 - starved)   the generators are; starved is the mean of their shares
    delta'  = T_gen / (n + 1)        n generators share the work evenly, and one more takes its part

The paper takes delta' from a profile. The even share is too large where one long response holds a
step, but there the generators idle, which makes delta small.
"""

import logging
import os
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L

from lrl.callbacks.base import OnRankZero, run_of
from lrl.callbacks.throughput import StepTimes, times_of
from lrl.checkpoints.run_folder import run_folder
from lrl.errors import ConfigError, at_least
from lrl.members.launchers import Job
from lrl.system.stopwatch import GENERATOR, shares

log = logging.getLogger(__name__)

RUN = "{run}"
JOIN = f"lrl join {RUN}"
END_S = 10.0
"""Seconds that a command has to end after each signal: an error's last checkpoint waits for it."""


class Elastic(OnRankZero):
    """Asks for one more generator by StreamRL's rule.

    Args:
        command: Shell words that start one, `{run}` for the run's folder: `lrl join {run}`, or a
            scheduler's command that runs it elsewhere. Their output goes to `elastic-<n>.log` in that
            folder. Null only logs that one would help.
        max_generators: Largest number of generators that write rollouts; null for no limit.
        steps: Steps in a row for which the rule must hold.
    """

    def __init__(
        self, command: str | None = None, max_generators: int | None = None, steps: int = 3
    ) -> None:
        at_least(1, "Elastic", steps=steps, max_generators=max_generators)
        if command is not None and shutil.which((shlex.split(command) or [""])[0]) is None:
            raise ConfigError(
                f"Elastic.command is {command!r}, which does not begin with a program on the path: "
                f"give the words that start a generator ({JOIN}), or null."
            )
        self.command = command
        self.max_generators = max_generators
        self.steps = steps
        self._more = 0  # steps in a row
        self._started: list[Job] = []
        self._joined_before = 0  # joined generators when the last command was started

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        fleet = run_of(trainer).fleet
        times = times_of(trainer)
        generators = len(fleet.rollouts.alive)
        full = self.max_generators is not None and generators >= self.max_generators
        self._more = self._more + 1 if lacks_one(times, generators) else 0
        folder = run_folder(trainer)
        run = shlex.quote(str(folder))
        if self._more == self.steps and not full:
            advice = (
                f"One more generator would help: of {times.step:.1f} s a step the trainer waited "
                f"{times.wait:.1f} s, and {generators} cannot write faster."
            )
            if self.command is None:  # the advice comes once
                log.warning("%s Type: %s", advice, JOIN.replace(RUN, run))
            else:
                command = self.command.replace(RUN, run)
                self._start(
                    command, advice, fleet.joined, folder / f"elastic-{len(self._started)}.log"
                )
        if self._more == self.steps and self.command is not None:
            self._more = 0

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Ends the started commands; their generators elsewhere notice the end of the run."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda job: job.stop(END_S), self._started))
        self._started.clear()

    def _start(self, command: str, advice: str, joined: int, output: Path) -> None:
        """Starts the command, unless the last one may still bring a generator."""
        if self._started and joined == self._joined_before:
            last = self._started[-1]
            if not last.status:
                return
            log.warning("The last one has failed with exit status %d: %s", last.status, last.tail())
        log.warning("%s Starting: %s", advice, command)
        self._joined_before = joined
        program, *words = shlex.split(command)
        program = shutil.which(program) or program
        try:
            self._started.append(Job([program, *words], os.environ, output))
        except OSError as error:
            log.warning("It cannot be started: %s", error)


def generation_s(times: StepTimes) -> float:
    its = shares(times.generators, GENERATOR)
    return times.step * (1.0 - its["starved"])


def lacks_one(times: StepTimes, generators: int) -> bool:
    """Tells whether generation is slower than training by at least what one more would save."""
    busy_s = generation_s(times)
    return busy_s - (times.step - times.wait) >= busy_s / (generators + 1)
