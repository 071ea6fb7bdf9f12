"""Programs as forks of one process that has imported Lightning and transformers, which takes a core
nine seconds.

A program of which a test looks at the start is started by its command instead (`tests.program`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lrl.system.ranks import Ranks

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.strategies." + name for name in ("gradient_of_ranks", "sharded_step", "sharded_fit")]
    + ["tests.strategies.run_of_ranks", "tests.strategies.run_that_ends"]
)
DEADLINE_S = 600.0


def run_ranks(
    program: Callable[..., None],
    ranks: int,
    folder: Path,
    *arguments: Any,
    ends: Sequence[int] = (),
) -> str:
    """Calls `program(*arguments)` in as many processes, with torchrun's variables; returns what
    they have printed.

    What they print is in files of `folder`, which is also their folder of temporary files.

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
    assert [rank.process.exitcode for rank in started] == list(ends or [0] * ranks), printed
    return printed


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

    def wait(self, timeout: float) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode

    def send_signal(self, signum: int) -> None:
        if self.process.is_alive():
            os.kill(self.pid, signum)


def start_fork(
    program: Callable[..., None], output: Path, variables: dict[str, str], *arguments: Any
) -> Fork:
    output.write_text("")
    # Not a daemon, which Python lets have no children: rank 0 has workers for rewards.
    process = CONTEXT.Process(target=be_program, args=(output, variables, program, arguments))
    process.start()
    return Fork(process, output)


def start_rank(
    program: Callable[..., None], rank: int, ranks: int, port: int, folder: Path, *arguments: Any
) -> Fork:
    """Starts one of them alone; see `run_ranks`."""
    place = torchruns_variables(rank, ranks, port) | {"TMPDIR": str(folder)}
    return start_fork(program, folder / f"output-{rank}", place, *arguments)


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


def be_program(
    output: Path,
    variables: dict[str, str],
    program: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    """Makes this fork a program with these variables: what it prints, errors too, is added to a
    file."""
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


@contextmanager
def met(folder: Path) -> Iterator[Ranks]:
    """Has this rank meet the others, and wait for them at the end."""
    wait, rank = timedelta(seconds=60), int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder / 'store'}", wait, world_size=ranks, rank=rank)
    yield Ranks(dist.new_group(backend="gloo", timeout=wait))
    dist.barrier()
    dist.destroy_process_group()
