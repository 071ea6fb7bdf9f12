"""A worker from outside, and those of one machine: starts, asks, ends and replaces them.

What ends a worker costs the job whose code ran; its other jobs can be done again elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import signal
import socket
import time
from base64 import b64decode, b64encode
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from os import getpid
from typing import Any

from lrl.errors import CallFailed, ConfigError, LrlError, WorkerLost, WorkersClosed
from lrl.system.event_loop import LoopThread
from lrl.workers import worker

log = logging.getLogger(__name__)

_POLL_S = 1.0  # between two looks at a worker
_END_S = 5.0  # for the end of a process whose connection has ended
_ALL_END_S = 10.0


@dataclass(frozen=True)
class WorkerSpec:
    """The code that a worker runs, and its limits; travels as JSON."""

    name: str  # `reward` or `environment`, as its settings begin
    code: bytes  # pickled; its `serve` answers calls
    timeout_s: float  # for a response, or for a turn
    memory_gib: float | None  # that it may allocate once the code is loaded; None for no limit
    start_timeout_s: float

    @property
    def one_call(self) -> bool:
        """Whether a job is one call, a worker's only one at a time."""
        return self.name == "reward"

    @property
    def setting(self) -> str:
        return "data.rewards" if self.one_call else "data.environment"

    def limit_s(self, jobs: int) -> float:
        """Returns the wall-clock seconds in which workers with so many jobs have answered."""
        return self.start_timeout_s + 4 * self.timeout_s * (jobs if self.one_call else 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"code": b64encode(self.code).decode()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> WorkerSpec:
        return cls(**fields | {"code": b64decode(fields["code"])})


class WorkerProcess:
    """A worker. Use it on the event loop that made it; Linux ends it with that loop's thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.lost = ""  # why it takes no more calls; empty if it does
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it has loaded the code; ConfigError if it cannot, TimeoutError if late."""
        self._spec = spec
        self._ended_by_a_job = False
        self._asked: dict[int, asyncio.Future[Any]] = {}
        # Spawned, not forked: the trainer has threads, pipes and sockets.
        context = multiprocessing.get_context("spawn")
        self._running: Any = context.RawValue(worker.RunningCode)
        # In shared memory: arguments of more than a pipe's 64 KiB would have this loop wait for
        # the process to import the user's script.
        self._code = context.RawArray("c", len(spec.code))
        self._code.raw = spec.code
        ours, theirs = socket.socketpair()
        self._process = context.Process(
            target=worker.main,
            args=(theirs, self._code, spec.memory_gib, getpid(), self._running),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        streams = asyncio.open_connection(sock=ours, limit=worker.LONGEST_LINE)
        self._streams = asyncio.ensure_future(streams)
        self._tasks = [asyncio.ensure_future(task) for task in (self._listen(), self._watch())]

    async def ask(self, job: int, call: dict[str, Any]) -> Any:
        """Returns the answer to a call; raises CallFailed if the job has failed, WorkerLost if the
        worker has ended through no fault of the job."""
        answer = self._asked[job] = asyncio.get_running_loop().create_future()
        try:
            await self._streams
            if self.lost:
                raise WorkerLost(self.lost, by_other=self._ended_by_a_job)
            self._send({"job": job, **call})
            return await answer
        finally:
            del self._asked[job]

    def end(self, job: int) -> None:
        """Ends an episode."""
        if self._streams.done() and not self.lost:
            self._send({"job": job, "end": True})

    def kill(self, why: str) -> None:
        """Ends it; what it was asked is lost. Idempotent."""
        if self.lost:
            return
        self.lost = why
        self._process.terminate()
        # Here: the garbage collector would close it on any thread, while this loop uses it.
        self._streams.add_done_callback(_close)
        for job in self._asked:
            self._answer(job, WorkerLost(why, by_other=self._ended_by_a_job))
        died = (
            f"A worker of {self._spec.setting} died while it started; its own message is above. It "
            f"imports the script that was run. {worker.GUARD}"
        )
        self._not_ready(ConfigError(died))

    def join(self) -> None:
        self._process.join(_END_S)

    def _send(self, message: dict[str, Any]) -> None:
        _, writer = self._streams.result()
        if not writer.is_closing():  # else its end answers what it was asked
            writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        reader, writer = await self._streams
        with suppress(ConnectionError, ValueError):  # of a line that its end has cut
            async for line in reader:
                self._take(json.loads(line))
        writer.close()
        until = time.monotonic() + _END_S
        while self._process.exitcode is None and time.monotonic() < until and not self.lost:
            await asyncio.sleep(0.01)
        self._end_at_fault(*self._cause())

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"ready": True} if not self.ready.done():
                self.ready.set_result(None)
            case {"refused": str(why)}:
                self._refuse(why)
            case {"job": int(job), "failed": [str(kind), str(text)]}:
                self._answer(job, CallFailed(kind, text))
            case {"job": int(job), "answer": answer}:
                self._answer(job, answer)

    def _refuse(self, why: str) -> None:
        refusal = f"{self._spec.setting} cannot be loaded in a worker: {why}"
        remedy = (
            "A worker imports its modules anew, without what this process has set up: see that "
            "they can be imported by themselves, and move what a notebook or a prompt defines to a "
            "file (begin its cell with `%%writefile my_rewards.py`)."
        )
        self._not_ready(ConfigError(f"{refusal}. {remedy}"))
        for job in self._asked:
            self._answer(job, CallFailed("exception", refusal))
        self.kill(refusal)

    def _answer(self, job: int, answer: Any) -> None:
        future = self._asked.get(job)
        if future is None or future.done():
            return
        if isinstance(answer, LrlError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    async def _watch(self) -> None:
        """Kills it if the code of a job runs for too long, or if it is silent."""
        await self._start()
        running, timeout_s = self._running, self._spec.timeout_s
        stretch, clock = running.stretch, worker.process_clock(running.pid)
        while not self.lost:
            await asyncio.sleep(min(_POLL_S, timeout_s / 4))
            if running.stretch != stretch or not self._asked:
                stretch, clock = running.stretch, worker.process_clock(running.pid)
                continue
            # It ends by itself what is awaited; it is silent if it does not.
            is_certain = running.job and running.item != worker.NOBODY
            if clock() > (timeout_s if is_certain else 2 * timeout_s):
                what = "reward after" if self._spec.one_call else "reply after"
                self._end_at_fault("timeout", f"no {what} {timeout_s:g} s")

    async def _start(self) -> None:
        limit_s = self._spec.start_timeout_s
        await asyncio.wait({self.ready}, timeout=limit_s)
        if not self.ready.done():
            why = (
                f"No worker of {self._spec.setting} was ready after "
                f"data.worker_start_timeout_s={limit_s:g}. It imports the script that is run "
                f"and the modules of {self._spec.setting}: see which is slow, or raise it."
            )
            self._not_ready(TimeoutError(why))
            self.kill(f"it was not ready after {limit_s:g} s")

    def _not_ready(self, error: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # it may be that nobody waits for it

    def _end_at_fault(self, kind: str, why: str) -> None:
        """Ends it, or notes its end; the job whose code ran has failed."""
        if self.lost:
            return
        running = self._running
        guilty = running.job
        if guilty in self._asked:
            item = None if running.item == worker.NOBODY else running.item
            self._answer(guilty, CallFailed(kind, why, item))
            self._ended_by_a_job = True
        if self.ready.done():
            log.warning("A worker of %s is replaced: %s", self._spec.setting, why)
        self.kill(why)

    def _cause(self) -> tuple[str, str]:
        """Returns kind and message of an end that nobody here has caused."""
        code = self._process.exitcode or 0
        if code == worker.OUT_OF_MEMORY:
            gib = self._spec.memory_gib
            limit = "" if gib is None else f"; data.{self._spec.name}_memory_gib is {gib:g}"
            return "memory", f"MemoryError{limit}"
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
        if code == -signal.SIGKILL:
            how = "was ended by SIGKILL, as Linux does when the machine is out of memory"
        return "crash", f"the worker {how}"


def _close(streams: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    _, writer = streams.result()
    writer.close()


class LocalWorkers:
    """The workers of this machine, or none if other machines do all the work. Call `start` and
    `close` from another thread than the loop's, and everything else on the loop."""

    name = "rank 0"

    def __init__(self, spec: WorkerSpec, count: int) -> None:
        self.spec = spec
        self.count = count
        self.jobs: Counter[str] = Counter()  # by their pool; counted by who gives and ends them
        self._replaced = 0
        self._loop: LoopThread | None = None
        self._processes: list[WorkerProcess] = []
        self._where: dict[int, WorkerProcess] = {}  # of each job
        self._free: asyncio.Semaphore  # the workers without a job, where a job is one call

    @property
    def replaced(self) -> int:
        """Workers that were killed or died, and are replaced."""
        return self._replaced + sum(bool(process.lost) for process in self._processes)

    def start(self, loop: LoopThread) -> None:
        """Starts the workers, and waits until one is ready; call `close` also after its errors:
        ConfigError if the code cannot be loaded or a worker dies while it starts, TimeoutError if
        none is ready in time."""
        if self._loop is None and self.count:
            self._loop = loop
            limit_s = 2 * self.spec.start_timeout_s + _ALL_END_S
            loop.wait(self._start(), limit_s, "starting workers")

    def close(self) -> None:
        """Kills the workers. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.wait(self._end(), _ALL_END_S, "ending workers")

    async def ask(self, spec: WorkerSpec, job: int, call: dict[str, Any]) -> Any:
        """Makes a call of a job; see `WorkerProcess.ask`."""
        return await (self._in_turn if spec.one_call else self._of_episode)(job, call)

    def end(self, spec: WorkerSpec, job: int) -> None:
        """Ends an episode."""
        if not spec.one_call and (process := self._where.pop(job, None)) is not None:
            process.end(job)

    def end_all(self) -> None:
        """Ends all episodes."""
        for job in list(self._where):
            self.end(self.spec, job)

    async def _start(self) -> None:
        self._free = asyncio.Semaphore(self.count)
        ready = [each.ready for each in self._alive()]
        done, _ = await asyncio.wait(ready, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()

    def _alive(self) -> list[WorkerProcess]:
        if self._loop is None:
            raise WorkersClosed(f"the workers of {self.spec.setting} are not running")
        alive = [process for process in self._processes if not process.lost]
        for process in self._processes:
            if process.lost and process.ready.exception():  # an error instead at the first start
                log.warning("A worker of %s is replaced: %s", self.spec.setting, process.lost)
        self._replaced += len(self._processes) - len(alive)
        while len(alive) < self.count:
            alive.append(WorkerProcess(self.spec))
        self._processes = alive
        return alive

    def _least_busy(self) -> WorkerProcess:
        jobs = Counter(self._where.values())
        return min(self._alive(), key=lambda each: (jobs[each], not each.ready.done()))

    async def _in_turn(self, job: int, call: dict[str, Any]) -> Any:
        async with self._free:
            process = self._where[job] = self._least_busy()
            try:
                answer = await process.ask(job, call)
            except asyncio.CancelledError:
                process.kill("nobody waits for its job")
                raise
            finally:
                self._where.pop(job, None)
        await asyncio.sleep(0)  # the worker gets its next job before this answer is read
        return answer

    async def _of_episode(self, job: int, call: dict[str, Any]) -> Any:
        if "begin" in call:
            self._where[job] = self._least_busy()
        if job not in self._where:
            raise WorkerLost("it has ended all its episodes")
        return await self._where[job].ask(job, call)

    async def _end(self) -> None:
        self._replaced = self.replaced
        for process in self._processes:
            process.kill("the run has ended its processes")
        for process in self._processes:
            process.join()
        self._processes.clear()
        self._where.clear()
