"""The workers of one machine. They are replaced when they have ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from lrl.errors import WorkerLost, WorkersClosed
from lrl.system.event_loop import LoopThread
from lrl.workers.process import WorkerProcess, WorkerSpec

_END_S = 10.0


class LocalWorkers:
    """Workers on a thread of their own, from `start` to `close`, for any thread and event loop: 0
    if those of other machines do all."""

    name = "rank 0"

    def __init__(self, spec: WorkerSpec, count: int) -> None:
        self.spec = spec
        self.count = count
        self.jobs: Counter[str] = Counter()  # by their pool; counted by who gives and ends them
        self._replaced = 0
        self._thread: LoopThread | None = None
        self._processes: list[WorkerProcess] = []
        self._where: dict[int, WorkerProcess] = {}  # of each job
        self._free: asyncio.Semaphore  # the workers without a job, where a job is one call

    @property
    def replaced(self) -> int:
        """Workers that were killed or died, and are replaced."""
        return self._replaced + sum(bool(process.lost) for process in self._processes)

    def start(self) -> None:
        """Starts the workers, and waits until one is ready; raises ConfigError if the code cannot
        be loaded or a worker dies while it starts, TimeoutError if none is ready in time."""
        if self._thread is not None or not self.count:
            return
        self._thread = LoopThread(f"lrl-{self.spec.name}-workers")
        limit_s = 2 * self.spec.start_timeout_s + _END_S
        try:
            self._thread.wait(self._start(), limit_s, "starting workers")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills the workers. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.wait(self._end(), _END_S, "ending workers")
            thread.close()

    async def ask(self, job: int, call: dict[str, Any]) -> Any:
        """Makes a call of a job, from any event loop; see `WorkerProcess.ask`."""
        thread = self._running()
        asks = self._in_turn(job, call) if self.spec.one_call else self._of_episode(job, call)
        return await asyncio.wrap_future(thread.submit(asks))

    def tell(self, job: int, why: str) -> None:
        """Ends an episode, from any thread; `why` is for those who still ask in it."""
        if self._thread is not None and not self.spec.one_call:
            self._thread.loop.call_soon_threadsafe(self._tell, job, why)

    def tell_all(self) -> None:
        """Ends all episodes."""
        for job in list(self._where):
            self.tell(job, "")

    async def _start(self) -> None:
        self._free = asyncio.Semaphore(self.count)
        ready = [each.ready for each in self._alive()]
        done, _ = await asyncio.wait(ready, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise WorkersClosed(f"the workers of {self.spec.setting} are not running")
        return self._thread

    def _alive(self) -> list[WorkerProcess]:
        self._running()
        alive = [process for process in self._processes if not process.lost]
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
                return await process.ask(job, call)
            except asyncio.CancelledError:
                process.kill("nobody waits for its job")
                raise
            finally:
                self._where.pop(job, None)

    async def _of_episode(self, job: int, call: dict[str, Any]) -> Any:
        if "begin" in call:
            self._where[job] = self._least_busy()
        if job not in self._where:
            raise WorkerLost("it has ended all its episodes")
        return await self._where[job].ask(job, call)

    def _tell(self, job: int, why: str) -> None:
        if (process := self._where.pop(job, None)) is not None:
            process.tell(job, why)

    async def _end(self) -> None:
        self._replaced = self.replaced
        for process in self._processes:
            process.kill("the run has ended its processes")
        for process in self._processes:
            process.join()
        self._processes.clear()
        self._where.clear()
        await asyncio.sleep(0)  # who still asks gets to know it before the loop ends
