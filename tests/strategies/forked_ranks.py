"""Ranks as forks of one process that has imported Lightning and transformers, which takes a core six seconds.

A program that is itself what a test looks at (how it starts, what it leaves) is started by its command instead.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lrl.runtime.ranks import Ranks

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [f"tests.strategies.{name}" for name in ("gradient_of_ranks", "reads_of_ranks", "sharded_step", "sharded_fit")]
)
DEADLINE_S = 600.0


def run_ranks(program: Callable[..., None], ranks: int, folder: Path, *arguments: Any, ends: Sequence[int] = ()) -> str:
    """Calls `program(*arguments)` in as many processes, with torchrun's variables; returns what they have printed.

    What they print is in files of `folder`, which is also their folder of temporary files.

    Raises:
        AssertionError: A rank has not ended in time, or with another status than that of `ends`; 0 without them.
    """
    outputs, port = [folder / f"output-{rank}" for rank in range(ranks)], free_port()
    places = [torchruns_variables(rank, ranks, port) | {"TMPDIR": str(folder)} for rank in range(ranks)]
    started = [
        CONTEXT.Process(target=_be_rank, args=(output, place, program, arguments), daemon=True)
        for output, place in zip(outputs, places, strict=True)
    ]
    for process in started:
        process.start()
    end = time.monotonic() + DEADLINE_S
    for process in started:
        process.join(max(0.0, end - time.monotonic()))
        process.kill()
    printed = "".join(output.read_text() for output in outputs)
    assert [process.exitcode for process in started] == list(ends or [0] * ranks), printed
    return printed


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def torchruns_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    return {name: str(value) for name, value in (place | meeting).items()}


def _be_rank(output: Path, place: dict[str, str], program: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(place)
    tempfile.tempdir = None  # the place that the imports have found
    torch.set_num_threads(1)
    program(*arguments)


def meet(folder: Path) -> Ranks:
    """Returns all ranks, when they have met through a file."""
    wait, rank, ranks = timedelta(seconds=60), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder / 'store'}", wait, world_size=ranks, rank=rank)
    return Ranks(dist.new_group(backend="gloo", timeout=wait))
