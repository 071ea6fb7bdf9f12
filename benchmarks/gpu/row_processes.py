"""The processes of one row of `benchmarks.gpu.two_processes`: how they start, meet, wait, and end.

Each has a session of its own and ends with the program that has started it, however that one ends.
They meet at a store of the program. Every wait has a deadline, and the store knows what for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from benchmarks.gpu.rows import Lines, first_lines

WAIT_S = 60.0
"""Longest wait of one process for another."""
LOOK_S = 0.05
REPEATS = 10
HOST = "127.0.0.1"


class Row(NamedTuple):
    """The processes of a row, each with variables of its environment; the first one answers."""

    parts: Sequence[Callable[[Part], None]]
    environments: Sequence[Mapping[str, str]] = ({}, {}, {})
    needs: str = ""
    """`gpu`, or `vllm` on one: without it the row has no answer."""


@dataclass(frozen=True)
class Part(Lines):
    """One process of a row, as the row's code sees it."""

    row: str
    number: int
    device: torch.device
    size: int
    """Bytes of the buffer."""
    folder: Path
    """Of policies."""
    policy: str
    """The size of one."""
    out: Path
    port: int
    store: dist.Store

    @property
    def about(self) -> dict[str, Any]:  # type: ignore[override]
        return {"row": self.row, "part": self.number, "mib": self.size // 2**20}

    def waits_for(self, what: str) -> None:
        self.store.set(f"{self.number} waits for", what)

    def give(self, name: str, content: bytes | str = b"yes") -> None:
        self.store.set(name, content)

    def take(self, name: str) -> bytes:
        """Waits for what another process gives, and returns it; raises torch's DistStoreError with
        its name at the deadline."""
        self.waits_for(name)
        found: bytes = self.store.get(name)
        self.waits_for("its own device")
        return found

    def result(self, call: Future[Any], what: str) -> Any:
        self.waits_for(what)
        if not wait([call], WAIT_S).done:
            raise TimeoutError(f"{what} did not end within {WAIT_S:g} s")
        self.waits_for("its own device")
        return call.result()

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def repeated(self, work: Callable[[], Any], repeats: int = REPEATS) -> float:
        work()
        self.synchronise()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        self.synchronise()
        return (time.perf_counter() - started) / repeats

    def numbers(self) -> torch.Tensor:
        return torch.arange(self.size // 4, dtype=torch.int32, device=self.device)


def connect(port: int) -> dist.TCPStore:
    return dist.TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=WAIT_S))


def be_part(part: Part, work: Callable[[Part], None]) -> NoReturn:
    """Does the work of one process, and ends it before CUDA's libraries are unloaded: they would
    wait for a GPU that hangs."""
    status = 0
    part.waits_for("its own device")
    try:
        work(part)
    except Exception as error:
        traceback.print_exc()
        said = f"part {part.number}: {first_lines(error)}"
        part.store.compare_set("error", "", said)  # not one that follows from the first
        status = 1
    sys.stderr.flush()
    os._exit(status)


def run_row(
    name: str, row: Row, command: Callable[[int, int], Sequence[str]], limit_s: float
) -> dict[str, Any]:
    """Runs the processes of a row to their end, or kills them; returns the answer.

    Args:
        name: Of the row.
        row: Its processes.
        command: Returns the command of a part, from its number and the store's port.
        limit_s: Seconds for the whole row.
    """
    started = time.monotonic()
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory(prefix="lrl-row-") as folder:
        logs = [Path(folder, str(number)) for number in range(len(row.parts))]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for number, log in enumerate(logs):
                own = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | row.environments[number]
                with log.open("wb") as output:
                    words = command(number, store.port)
                    running.append(
                        subprocess.Popen(
                            words, env=own, stdout=output, stderr=output, start_new_session=True
                        )
                    )
            error = _wait(running, store, started + limit_s)
        finally:
            for process in running:
                _end(process)
        answer = {"row": name, "works": not error, "row_s": time.monotonic() - started}
        return answer | ({"error": error, "said": last_words(logs)} if error else {})


def _wait(running: Sequence[subprocess.Popen[bytes]], store: dist.Store, deadline: float) -> str:
    """Waits until all have ended, well or killed by the first; returns what went wrong, or
    nothing."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in running]
        for number, code in enumerate(codes):
            if code and not (number and code == -signal.SIGKILL):
                said = store.get("error").decode() if store.check(["error"]) else ""
                return said or f"part {number} ended with status {code}"
        if None not in codes:
            return ""
        time.sleep(LOOK_S)
    keys = [f"{number} waits for" for number in range(len(running))]
    waits = [f"part {key} {store.get(key).decode()}" for key in keys if store.check([key])]
    return f"no end within the row's limit: {', '.join(waits) or 'no part has begun'}"


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_words(logs: Sequence[Path]) -> list[str]:
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    warnings = [line for line in lines if "NCCL WARN" in line]
    return [line[-300:] for line in (warnings or lines)[-5:]]
