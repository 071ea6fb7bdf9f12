"""A sandbox that runs, seen from outside: asks for runs of its program, watches their limits.

Who is to blame is decided by what the runner has said. Until a run has begun, all that fails is the
machine's fault, and an error. From then on it is the program's, and its result.
"""

import marshal
import os
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil

from lrl.rewards.sandbox_runner import WITH_TESTS, WITHOUT_TESTS
from lrl.system.process_clock import ProcessClock

START_S = 30.0
"""Seconds for the start of a sandbox, and for each answer of its runner."""
_POLL_S = 0.2
_LONGEST_LINE = 4096
_LONGEST_ERROR = 300
_FOLDERS = ("tmp", "dev/shm")
_MOST_FILES = 2**14
"""Files that a program may make: an empty one takes a KiB of the kernel's memory, and no limit of
Linux counts it."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""How bwrap ends if it is killed, and if the first process of the sandbox is, which nobody inside
can do."""
_ENDED = re.compile(rb"ended (-?\d{1,3}) (\d{1,9}\.\d{3})")
MODULES = ("solution", "program", "main", "submission")
"""Names under which tests may import the program."""


@dataclass(frozen=True)
class Limits:
    """The limits of a program; see `lrl.rewards.Code`."""

    timeout_s: float = 4.0
    memory_mib: int = 512
    cpu_s: int = 2
    max_processes: int = 8
    max_output_bytes: int = 2**20


class Step(NamedTuple):
    """A piece of a row's tests, which runs after the program, beside it."""

    source: str
    is_test: bool
    """Whether it counts; else a failure of it fails all that come later."""


class Run(NamedTuple):
    """The outcome of a run of the program."""

    output: bytes
    error: str
    """The last line of its standard error."""
    status: int
    """Its exit status, or minus the signal that has ended it."""
    limit: str
    """The limit that has ended it; empty if none has."""
    passed: frozenset[int]
    """Numbers of the steps that have passed."""
    unfit: str
    """Why the tests cannot run here, whatever the program; empty if they can."""


class SandboxSession:
    """A sandbox with a program. Use it in a `with`; at its end nothing of it is left.

    Args:
        process: The sandbox, with pipes for its outputs.
        link: The socket to its runner.
        sheet: The file that the runner reads.
        stdin: The file that is the program's input.
        limits: The limits of all runs together (seconds) and of each (the others).
        is_isolated: Whether the runner is a child of `process`, or is it.
        resources: What is closed at the end.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        link: socket.socket,
        sheet: int,
        stdin: int,
        limits: Limits,
        is_isolated: bool,
        resources: ExitStack,
    ) -> None:
        self._process = process
        self._link = link
        self._sheet = sheet
        self._stdin = stdin
        self._limits = limits
        self._is_isolated = is_isolated
        self._resources = resources
        self._selector = selectors.DefaultSelector()
        self._root: Path | None = None
        self._read = {"output": bytearray(), "error": bytearray(), "link": bytearray()}
        self._is_up = False
        self._is_dead = False
        self._used_s = 0.0
        self._wall_s = 0.0
        self._new_run(has_tests=False)

    def __enter__(self) -> Self:
        assert self._process.stdout is not None and self._process.stderr is not None
        died = os.pidfd_open(self._process.pid)
        self._resources.callback(os.close, died)
        streams = {
            "output": self._process.stdout.fileno(),
            "error": self._process.stderr.fileno(),
            "link": self._link.fileno(),
        }
        for name, stream in streams.items():
            os.set_blocking(stream, False)
            self._selector.register(stream, selectors.EVENT_READ, name)
        self._selector.register(died, selectors.EVENT_READ, "died")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._kill()
        finally:
            self._selector.close()
            for stream in (self._process.stdout, self._process.stderr):
                if stream is not None:
                    stream.close()
            self._resources.close()

    @property
    def is_open(self) -> bool:
        """Whether it can run the program again: a broken limit of time or output ends it."""
        return self._process.poll() is None

    def run(
        self,
        stdin: bytes = b"",
        steps: Sequence[Step] = (),
        names: Sequence[str] = (),
        ends_at_failure: bool = True,
    ) -> Run:
        """Runs the program once.

        Args:
            stdin: Its input.
            steps: What runs after it, in a process that calls it.
            names: The program's names that the steps see.
            ends_at_failure: Whether the first step that fails is the last one.

        Raises:
            RuntimeError: The sandbox did not start, or was ended from outside.
            TimeoutError: It did not start in time, or the machine gave the program no processor.
        """
        self._new_run(has_tests=bool(steps))
        _fill(self._stdin, stdin)
        os.lseek(self._stdin, 0, os.SEEK_SET)  # the place is one for both ends
        self._wait_for_start()
        if steps:
            tests = {
                "steps": [tuple(step) for step in steps],
                "names": list(names),
                "classes": [name for name in names if name[:1].isupper()],
                "modules": MODULES,
                "ends_at_failure": ends_at_failure,
            }
            fill_sheet(self._sheet, tests)
        self._link.send(WITH_TESTS if steps else WITHOUT_TESTS)
        limit = self._until_ended()
        self._used_s = self._seconds()
        self._wall_s = self._all_wall_s()
        return self._result(limit)

    def _new_run(self, has_tests: bool) -> None:
        for buffer in self._read.values():
            buffer.clear()
        self._has_tests = has_tests
        self._passed: set[int] = set()
        self._unfit = ""
        self._ended: tuple[int, float] | None = None
        self._asked = time.monotonic()
        self._began = 0.0
        self._clock: ProcessClock | None = None
        self._oom_kills = _oom_kills()

    def _wait_for_start(self) -> None:
        while not self._is_up:
            self._take_all(_POLL_S)
            self._check_answer()
        self._asked = time.monotonic()

    def _until_ended(self) -> str:
        """Waits for the end of a run; returns the limit that it has broken, or an empty text."""
        while self._ended is None:
            self._take_all(_POLL_S)
            if limit := self._broken_limit():
                self._kill()
                return limit
            self._check_answer()
        while self._take_all(0):  # all of it is there: its writers have ended
            pass
        return self._broken_output_limit() or self._limit_in(*self._ended)

    def _check_answer(self) -> None:
        """Raises an error if the runner is gone, or does not answer."""
        if self._is_dead and self._ended is None:
            while self._take_all(0):
                pass
            status = self._process.wait()
            if self._ended is None and self._began and status not in _KILLED:
                self._ended = (status, 0.0)
            if self._ended is None:
                raise RuntimeError(self._cause_of_death(status))
        if not self._began and time.monotonic() - self._asked > START_S:
            raise TimeoutError(f"the sandbox has not started a program in {START_S:g} s")

    def _cause_of_death(self, status: int) -> str:
        said = self._last_error() or "it has said nothing"
        if not self._is_up:
            return f"the sandbox did not start (status {status}): {said}"
        return (
            f"the sandbox was ended from outside (status {status}), as Linux does when the machine "
            f"is out of memory: {said}"
        )

    def _take_all(self, timeout_s: float) -> bool:
        """Takes what has come from the sandbox; returns whether there was anything."""
        found = False
        for key, _ in self._selector.select(timeout_s):
            name = key.data
            block = b"" if name == "died" else os.read(key.fd, 2**16)
            if block:
                found = True
                self._read[name] += block
                continue
            self._selector.unregister(key.fileobj)
            self._is_dead = self._is_dead or name == "died"
        *lines, rest = self._read["link"].split(b"\n")
        self._read["link"] = bytearray(rest[-_LONGEST_LINE:])
        for line in lines:
            self._take_line(bytes(line))
        return found

    def _take_line(self, line: bytes) -> None:
        word, _, rest = line.partition(b" ")
        if line == b"up":
            self._is_up = True
        elif line == b"begun" and not self._began:
            self._began = time.monotonic()
        elif word == b"passed":
            self._passed.add(int(rest))
        elif word == b"unfit":
            self._unfit = rest.decode(errors="replace")
        elif ended := _ENDED.fullmatch(line):
            self._ended = (int(ended[1]), float(ended[2]))

    def _seconds(self) -> float:
        """Returns the seconds of all runs in which the program computed or slept.

        Of a run that was over before anybody looked only the computing is known.
        """
        if self._clock is not None:
            return self._used_s + self._clock.seconds
        return self._used_s + (0.0 if self._ended is None else self._ended[1])

    def _all_wall_s(self) -> float:
        return self._wall_s + (time.monotonic() - self._began if self._began else 0.0)

    def _broken_limit(self) -> str:
        if limit := self._broken_output_limit():
            return limit
        if not self._began:
            return ""
        if self._files() > _MOST_FILES:
            return f"the limit of {_MOST_FILES} files"
        timeout_s = self._limits.timeout_s
        if self._clock is None and time.monotonic() - self._began > _POLL_S:
            processes = self._processes()
            self._clock = ProcessClock(*processes, born=self._began) if processes else None
        if self._seconds() > timeout_s:
            return f"the time limit of {timeout_s:g} s"
        if self._all_wall_s() <= 2 * timeout_s:
            return ""
        if self._has_several_processes():  # they may have taken the processor from each other
            return f"the time limit of {timeout_s:g} s"
        raise TimeoutError(
            f"the machine is too busy: in {2 * timeout_s:g} s the program had a processor for "
            f"{self._seconds():.1f} s. Lower data.reward_workers, or raise timeout_s"
        )

    def _broken_output_limit(self) -> str:
        written = len(self._read["output"]) + len(self._read["error"])
        most = self._limits.max_output_bytes
        return f"the limit of {most} bytes of output" if written > most else ""

    def _files(self) -> int:
        """Returns how many files all runs have made."""
        if self._root is None and self._is_isolated and (runner := self._runner()) is not None:
            self._root = Path(f"/proc/{runner.pid}/root")
        with suppress(OSError):  # it has ended
            places = [os.statvfs(self._root / name) for name in _FOLDERS] if self._root else []
            return sum(place.f_files - place.f_ffree for place in places)
        return 0

    def _limit_in(self, status: int, cpu_s: float) -> str:
        """Returns the limit that has ended a program with this exit status."""
        killed = status == -signal.SIGKILL
        if status == -signal.SIGXCPU or (killed and cpu_s >= self._limits.cpu_s):
            return f"the limit of {self._limits.cpu_s} s of CPU time"
        if killed and _oom_kills() != self._oom_kills:
            raise RuntimeError("Linux has ended the program: the machine is out of memory")
        if self._last_error().startswith("MemoryError"):
            return f"the limit of {self._limits.memory_mib} MiB of memory"
        return ""

    def _result(self, limit: str) -> Run:
        return Run(
            output=bytes(self._read["output"]),
            error=self._last_error(),
            status=0 if self._ended is None else self._ended[0],
            limit=limit,
            passed=frozenset(self._passed),
            unfit=self._unfit,
        )

    def _last_error(self) -> str:
        lines = self._read["error"].decode(errors="replace").strip().splitlines()
        return lines[-1][:_LONGEST_ERROR] if lines else ""

    def _runner(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self._process.pid)
            return process.children()[0] if self._is_isolated else process
        except (psutil.NoSuchProcess, IndexError):
            return None

    def _processes(self) -> list[int]:
        """Returns the program's first process, and that of its tests: they wait for each other."""
        runner = self._runner()
        if runner is None:
            return []
        with suppress(psutil.NoSuchProcess):
            children = sorted(runner.children(), key=psutil.Process.create_time)
            return [each.pid for each in children[: 1 + self._has_tests]]
        return []

    def _has_several_processes(self) -> bool:
        runner = self._runner()
        if runner is None:
            return False
        with suppress(psutil.NoSuchProcess):
            return len(runner.children(recursive=True)) > 1 + self._has_tests
        return False

    def _kill(self) -> None:
        """Ends the sandbox. Its first process ends with bwrap, and all in it with that one."""
        if self._process.poll() is None and self._is_isolated:
            self._process.kill()
        if not self._is_isolated:  # the runner may have ended before what it has started
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(START_S)


def fill_sheet(sheet: int, content: Any) -> None:
    """Writes what the runner reads next."""
    _fill(sheet, marshal.dumps(content, 2))  # a version that every Python 3 reads


def _fill(file: int, content: bytes) -> None:
    os.ftruncate(file, 0)
    written = 0
    while written < len(content):
        written += os.pwrite(file, content[written:], written)


def _oom_kills() -> str:
    """Returns the line of the kernel with the number of processes that it has ended for lack of
    memory."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next((line for line in lines if line.startswith("oom_kill ")), "")
