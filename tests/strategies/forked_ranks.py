"""Programs as forks of one process that has imported Lightning and transformers, which takes a core
nine seconds: the ranks of a run, on one machine or on two (network namespaces).

A program of which a test looks at the start is started by its command instead (`tests.program`).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.leftovers import wait_for
from tests.network_namespace import Machine

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.strategies." + name for name in ("step_of_ranks", "run_of_ranks")]
)
DEADLINE_S = 600.0
"""Longest wait for a line or an end; the deadlines that tests are about are the program's."""
CLONE_NEWNS = 0x20000
RANK_0, PORT = "10.213.0.1", 29500
"""Where the ranks of two machines meet."""


@dataclass
class Fork:
    """A program that was started, with the words of `subprocess.Popen`, and the file with what it
    prints."""

    process: BaseProcess
    output: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def printed(self) -> str:
        return self.output.read_text()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float = DEADLINE_S) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode

    def wait_for(self, words: str) -> None:
        wait_for(lambda: words in self.printed() or self.poll() is not None, DEADLINE_S, words)
        assert words in self.printed(), self.printed()

    def send_signal(self, signum: int) -> None:
        if self.process.is_alive():
            os.kill(self.pid, signum)


def start_fork(
    program: Callable[..., None],
    output: Path,
    variables: dict[str, str],
    *arguments: Any,
    machine: Machine | None = None,
    hidden: tuple[Path, ...] = (),
) -> Fork:
    """Starts `program(*arguments)` in the folder of `output`, which is also that of its temporary
    files; on a machine of its own it sees nothing in the `hidden` folders, which are not shared."""
    output.write_text("")
    place = (output, {"TMPDIR": str(output.parent)} | variables, machine, hidden)
    # Not a daemon, which Python lets have no children: rank 0 has workers for rewards.
    process = CONTEXT.Process(target=_be_program, args=(*place, program, arguments))
    process.start()
    return Fork(process, output)


def run_ranks(
    program: Callable[..., None],
    ranks: int,
    folder: Path,
    *arguments: Any,
    ends: Sequence[int] = (),
) -> str:
    """Calls `program(*arguments)` in as many processes, with torchrun's variables; returns what
    they have printed, which is in files of `folder`.

    Raises:
        AssertionError: A rank has not ended in time, or with another status than that of `ends`; 0
            without them.
    """
    port = free_port()
    started = [start_rank(program, rank, ranks, port, folder, *arguments) for rank in range(ranks)]
    end = time.monotonic() + DEADLINE_S
    for rank in started:
        rank.wait(max(0.0, end - time.monotonic()))
        rank.process.kill()
    printed = "".join(rank.printed() for rank in started)
    assert [rank.poll() for rank in started] == list(ends or [0] * ranks), printed
    return printed


def run_alone(program: Callable[..., None], folder: Path, *arguments: Any, **variables: str) -> str:
    """As `run_ranks`, in one process without a rank's variables."""
    alone = start_fork(program, folder / "output", variables, *arguments)
    try:
        assert alone.wait() == 0, alone.printed()
        return alone.printed()
    finally:
        alone.process.kill()


def start_rank(
    program: Callable[..., None], rank: int, ranks: int, port: int, folder: Path, *arguments: Any
) -> Fork:
    """Starts one of them alone; see `run_ranks`."""
    variables = torchruns_variables(rank, ranks, port)
    return start_fork(program, folder / f"output-{rank}", variables, *arguments)


@contextmanager
def nodes(folder: Path) -> Iterator[Callable[..., Fork]]:
    """Yields what starts one of two trainer nodes: a rank with a machine, a folder and torchrun's or
    SLURM's variables of its own."""
    started: list[Fork] = []

    def start(
        number: int,
        machine: Machine,
        program: Callable[..., None],
        *words: Any,
        hidden: tuple[Path, ...] = (),
        started_by: Callable[[int], dict[str, str]] = as_torchrun,
        **variables: str,
    ) -> Fork:
        place = folder / f"node-{number}"
        place.mkdir(exist_ok=True)
        own = started_by(number) | variables
        how: dict[str, Any] = {"machine": machine, "hidden": hidden}
        started.append(start_fork(program, place / "output", own, *words, **how))
        return started[-1]

    try:
        yield start
    finally:
        for node in started:
            node.process.kill()
            node.process.join()


def have_forkserver() -> None:
    """Starts what forks, before a test marks what it starts: that is not of the test, and stays."""
    forkserver.ensure_running()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def torchruns_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    place |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    return {name: str(value) for name, value in (place | meeting).items()}


def as_torchrun(number: int) -> dict[str, str]:
    """The variables of torchrun's worker on a node; the agent's store is left out, so that rank 0
    opens it."""
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(number)}
    return torchruns_variables(number, 2, PORT) | place | {"MASTER_ADDR": RANK_0}


def as_slurm(number: int) -> dict[str, str]:
    place = {"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": 0, "SLURM_NTASKS": 2}
    job = {"SLURM_NTASKS_PER_NODE": 1, "SLURM_NNODES": 2, "SLURM_JOB_ID": 7}
    meeting = {"SLURM_JOB_NAME": "lrl", "MASTER_ADDR": RANK_0, "MASTER_PORT": PORT}
    return {name: str(value) for name, value in (place | job | meeting).items()}


def _be_program(
    output: Path,
    variables: dict[str, str],
    machine: Machine | None,
    hidden: tuple[Path, ...],
    program: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    """Makes this fork a program with these variables: what it prints, errors too, is added to a
    file."""
    if machine is not None:
        machine.enter()
    if hidden and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    if hidden:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for one in hidden:
        subprocess.run(["mount", "-t", "tmpfs", "none", str(one)], check=True)
    os.chdir(output.parent)
    # Tests that a shell runs in the background inherit its ignored SIGINT, and so would this
    # program.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    tempfile.tempdir = None  # the place that the imports have found
    # A tracker of its own, as a program has: after a SIGKILL it removes what is left.
    resource_tracker._resource_tracker.__init__()
    torch.set_num_threads(1)
    try:
        program(*arguments)
    except Exception as error:
        # As an uncaught error of a script is shown.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        raise SystemExit(1) from None
