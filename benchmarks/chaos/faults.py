"""Faults of a target's processes on this machine, and orders to it.

A target runs a shell command that it was ordered at the next call of a phase's function, once: so
a fault comes in the middle of a sync or of a save, which are too short to be met by looking at a
journal.
"""

from __future__ import annotations

import functools
import importlib
import subprocess
import time
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from tests.leftovers import words

PARTS = {"API server": "vllm_plugin", "EngineCore": "EngineCore", "Worker": "Worker"}
"""The processes of a generator, and a word of their command lines."""
WITH_A_WORKER = {"distributed-executor-backend": "mp"}
"""Flags of a server whose worker is a separate process, as with several GPUs: it can then be
broken, too."""
SUPERVISOR = "generators/supervisor.py"
GENERATORS = 2
"""In every target."""
SIGNALS = {"kill": "KILL", "freeze": "STOP"}
WHOSE = {"generator 0": (0,), "generator 1": (1,), "both": (0, 1)}
"""Generators by the order of their ports."""
OF_GENERATORS = {
    f"{how} {part} of {whose}": (how, part, WHOSE[whose])
    for how, part, whose in product(SIGNALS, PARTS, WHOSE)
}
"""A signal to one part of some generators at the same moment."""
PLACES: dict[str, tuple[str, str]] = {
    "step": ("lrl.policy", "PolicyModule.compute_loss"),
    "sync": ("lrl.weights.sync", "Sync._load"),
    "save": ("lrl.checkpoints.checkpoint_file", "CheckpointFile.save_checkpoint"),
}
"""A function that rank 0 calls in each phase; that of a sync stands between pause and resume."""


def signal_to(fault: str, trainer: int) -> str:
    """Returns the shell command of one of `OF_GENERATORS`."""
    how, part, numbers = OF_GENERATORS[fault]
    supervisors = sorted(children(trainer, SUPERVISOR), key=port)
    targets = [part_of(supervisors[number], part) for number in numbers]
    return f"kill -{SIGNALS[how]} {' '.join(str(one.pid) for one in targets)}"


def children(process: int, word: str) -> list[psutil.Process]:
    """Returns the process's own children whose command has this word."""
    return [one for one in psutil.Process(process).children() if word in " ".join(words(one))]


def part_of(supervisor: psutil.Process, part: str) -> psutil.Process:
    """Returns the process of a generator that is its `part`.

    Raises:
        ValueError: There is none, or more than one.
    """
    everything = supervisor.children(recursive=True)
    (found,) = [one for one in everything if PARTS[part] in " ".join(words(one))]
    return found


def port(supervisor: psutil.Process) -> int:
    """Returns the port of a supervisor's generator, which keeps it for the whole run."""
    command = words(supervisor)
    return int(command[command.index("--port") + 1])


# ---- orders: given from outside, obeyed by the target


def give(folder: Path, place: str, command: str) -> None:
    (folder / "carried-out").unlink(missing_ok=True)
    unfinished = folder / "unfinished-order"
    unfinished.write_text(command)
    unfinished.rename(folder / f"order-{place}")


def carried_out(folder: Path) -> float | None:
    """Returns the time at which the last order was carried out, in seconds since 1970; None if it
    was not yet."""
    told = folder / "carried-out"
    return float(told.read_text() or "nan") if told.exists() else None


def obey(folder: Path) -> None:
    for place, (module, path) in PLACES.items():
        owner: Any = importlib.import_module(module)
        *inner, name = path.split(".")
        for part in inner:
            owner = getattr(owner, part)
        order = folder / f"order-{place}"
        setattr(owner, name, _after_orders(getattr(owner, name), order, folder / "carried-out"))


def _after_orders(function: Any, order: Path, told: Path) -> Any:
    @functools.wraps(function)
    def acting(*args: Any, **settings: Any) -> Any:
        if order.exists():
            command = order.read_text()
            order.unlink()
            told.write_text(str(time.time()))
            subprocess.run(["sh", "-c", command], check=True)
        return function(*args, **settings)

    return acting


def in_turn(kills: int, freezes: int) -> list[str]:
    """Returns faults of `OF_GENERATORS`: each part and each generator in turn, freezes between the
    kills, and at last a kill of both generators."""
    parts = list(PARTS)

    def fault(how: str, number: int) -> str:
        return f"{how} {parts[number % 3]} of generator {number % 2}"

    faults, apart = list[str](), max(1, kills // max(1, freezes))
    for number in range(kills):
        faults.append(fault("kill", number))
        if (number + 1) % apart == 0 and number // apart < freezes:
            faults.append(fault("freeze", number // apart))
    return [*faults, "kill EngineCore of both"]
