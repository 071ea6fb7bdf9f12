"""Signals to the processes of generators and reward workers, and the order in which they are
sent."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

PARTS = {"API server": "api_server", "EngineCore": "EngineCore", "Worker": "Worker"}
"""The processes of a generator, and a word of their command lines."""
WITH_A_WORKER = {"distributed-executor-backend": "mp"}
"""Flags of a server whose worker is a separate process, as with several GPUs: it can then be
broken, too."""
SUPERVISOR = "generators/supervisor.py"
GENERATORS = 2
"""In every target."""


@dataclass(frozen=True)
class Fault:
    """A signal to one part of some generators at the same moment.

    Args:
        part: One of `PARTS`.
        generators: By the order of their ports.
        freeze: Sends SIGSTOP, not SIGKILL.
    """

    part: str
    generators: tuple[int, ...]
    freeze: bool = False

    def __str__(self) -> str:
        whose = "both" if len(self.generators) > 1 else f"generator {self.generators[0]}"
        return f"{'freeze' if self.freeze else 'kill'} {self.part} of {whose}"

    def inject(self, trainer: int) -> None:
        supervisors = supervisors_of(trainer)
        targets = [part_of(supervisors[generator], self.part) for generator in self.generators]
        for target in targets:
            target.send_signal(signal.SIGSTOP if self.freeze else signal.SIGKILL)


def in_turn(kills: int, freezes: int, both: bool) -> list[Fault]:
    parts = list(PARTS)
    faults = [Fault(parts[number % 3], (number % 2,)) for number in range(kills)]
    apart = max(1, kills // max(1, freezes))
    for number in range(freezes):
        place = min(len(faults), (number + 1) * apart + number)
        faults.insert(place, Fault(parts[number % 3], (number % 2,), freeze=True))
    return faults + ([Fault("EngineCore", (0, 1))] if both else [])


FIRST_S = 15.0
"""Seconds until the first fault of a soak, and between the faults of `FIRST`, once all generators
serve."""
FIRST = (
    *(Fault(part, tuple(range(GENERATORS))) for part in PARTS),
    Fault("EngineCore", (0, 1), freeze=True),
)
"""A soak's faults in the steps that are not counted. No step is made while all generators are
out."""


class RandomFaults:
    """The faults of a soak: one of each kind at the start, then one at a regular interval, drawn by
    a seed.

    Args:
        trainer: Process id of the target.
        every_s: Seconds between two.
        seed: Of their kinds.
    """

    def __init__(self, trainer: int, every_s: float, seed: int) -> None:
        self.trainer = trainer
        self.every_s = every_s
        self.counts: Counter[str] = Counter()
        self._first = list(FIRST)
        self._draw = random.Random(seed)
        self._next = time.monotonic() + min(FIRST_S, every_s)

    def tick(self, whole: bool) -> None:
        """Injects a fault if one is due; while a generator is out (`whole` is False), into the
        rewards."""
        if time.monotonic() < self._next:
            return
        if self._first:
            if whole:
                self._break_rewards()
                self._break(self._first.pop(0))
                self._next = time.monotonic() + min(FIRST_S, self.every_s)
            return
        self._next += self.every_s
        part = self._draw.choice([*PARTS, "reward worker"])
        fault = Fault(part, (self._draw.randrange(GENERATORS),), freeze=self._draw.random() < 0.25)
        if whole and part in PARTS:
            self._break(fault)
        else:
            self._break_rewards()

    def _break(self, fault: Fault) -> None:
        fault.inject(self.trainer)
        self.counts["freeze" if fault.freeze else "kill"] += len(fault.generators)

    def _break_rewards(self) -> None:
        if workers := reward_workers_of(self.trainer):
            self._draw.choice(workers).kill()
            self.counts["reward worker"] += 1


def supervisors_of(trainer: int) -> list[psutil.Process]:
    """Returns the supervisors of a trainer's generators by port, which a generator keeps for the
    whole run."""
    supervisors = [
        child
        for child in psutil.Process(trainer).children()
        if SUPERVISOR in " ".join(words(child))
    ]
    return sorted(supervisors, key=port)


def part_of(supervisor: psutil.Process, part: str) -> psutil.Process:
    """Returns the process of a generator that is its `part`.

    Raises:
        RuntimeError: There is none, or more than one.
    """
    found = [
        process
        for process in supervisor.children(recursive=True)
        if PARTS[part] in " ".join(words(process))
    ]
    if len(found) != 1:
        raise RuntimeError(
            f"{len(found)} processes of the generator at port {port(supervisor)} are its {part}, "
            "not one."
        )
    return found[0]


def reward_workers_of(trainer: int) -> Sequence[psutil.Process]:
    return [
        child
        for child in psutil.Process(trainer).children()
        if "spawn_main" in " ".join(words(child))
    ]


def port(supervisor: psutil.Process) -> int:
    command = words(supervisor)
    return int(command[command.index("--port") + 1])


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
