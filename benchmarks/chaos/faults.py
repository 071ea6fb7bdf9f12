"""How a generator or a reward worker is broken from outside: a signal to one of its processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

PARTS = {"API server": "api_server", "EngineCore": "EngineCore", "Worker": "Worker"}
"""The processes of a generator, and what their command lines hold."""
WITH_A_WORKER = {"distributed-executor-backend": "mp"}
"""Flags of a server whose worker is a process of its own, as with several GPUs: that one can be broken, too."""
KEEPER = "generators/supervisor.py"


@dataclass(frozen=True)
class Fault:
    """A signal to one part of some generators at the same moment.

    Args:
        part: One of `PARTS`.
        generators: By the order of their ports.
        freeze: SIGSTOP in the place of SIGKILL.
    """

    part: str
    generators: tuple[int, ...]
    freeze: bool = False

    def __str__(self) -> str:
        whose = "both" if len(self.generators) > 1 else f"generator {self.generators[0]}"
        return f"{'freeze' if self.freeze else 'kill'} {self.part} of {whose}"

    def inject(self, trainer: int) -> None:
        """Send the signal to the generators of the process `trainer`."""
        supervisors = keepers_of(trainer)
        targets = [part_of(supervisors[generator], self.part) for generator in self.generators]
        for target in targets:
            target.send_signal(signal.SIGSTOP if self.freeze else signal.SIGKILL)


def in_turn(kills: int, freezes: int, both: bool) -> list[Fault]:
    """The faults of one run: each part in turn, generator after generator, freezes among the kills, both at the end."""
    parts = list(PARTS)
    faults = [Fault(parts[number % 3], (number % 2,)) for number in range(kills)]
    apart = max(1, kills // max(1, freezes))
    for number in range(freezes):
        place = min(len(faults), (number + 1) * apart + number)
        faults.insert(place, Fault(parts[number % 3], (number % 2,), freeze=True))
    return faults + ([Fault("EngineCore", (0, 1))] if both else [])


def keepers_of(trainer: int) -> list[psutil.Process]:
    """The supervisors of a trainer's generators, by port: each generator keeps its own for the whole run."""
    supervisors = [child for child in psutil.Process(trainer).children() if KEEPER in " ".join(words(child))]
    return sorted(supervisors, key=port)


def part_of(supervisor: psutil.Process, part: str) -> psutil.Process:
    """The process of a generator that is its `part`.

    Raises:
        RuntimeError: There is none, or more than one.
    """
    found = [process for process in supervisor.children(recursive=True) if PARTS[part] in " ".join(words(process))]
    if len(found) != 1:
        raise RuntimeError(
            f"{len(found)} processes of the generator at port {port(supervisor)} are its {part}, not one."
        )
    return found[0]


def reward_workers_of(trainer: int) -> Sequence[psutil.Process]:
    """The processes that score a trainer's responses."""
    return [child for child in psutil.Process(trainer).children() if "spawn_main" in " ".join(words(child))]


def port(supervisor: psutil.Process) -> int:
    """Where the supervisor's generator answers."""
    command = words(supervisor)
    return int(command[command.index("--port") + 1])


def words(process: psutil.Process) -> list[str]:
    """The command line of a process; empty when it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
