"""Signals to the processes of generators and reward workers, and the order in which they are
sent."""

from __future__ import annotations

import signal
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
