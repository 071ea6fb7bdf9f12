"""Timeline of a run (`lrl.rollouts.timeline`), to which the simulator's costs are fitted."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lrl.callbacks.base import OnRankZero, run_of
from lrl.callbacks.throughput import StepTimes, times_of
from lrl.checkpoints.run_folder import run_folder
from lrl.generators.generator import Generator, StatsSnapshot
from lrl.generators.pool import GeneratorPool
from lrl.rollouts import timeline
from lrl.rollouts.stream import StepStream
from lrl.rollouts.timeline import GeneratorRecord, MicroBatchRecord, StepRecord
from lrl.system.output import best_effort

SAMPLE_S = 0.1
"""Seconds between two snapshots of a generator."""
INTERVAL_S = 1.0
SHORTEST_S = 0.25
"""A token more or less would be much of a shorter interval, which is dropped."""


class Timeline(OnRankZero):
    """Writes `timeline.jsonl` into the run's folder, with the times of `Throughput`.

    A run that resumes in the same folder removes the records of steps that it trains again. On a GPU
    the trainer waits for the end of every backward pass, so that each has its own time.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._work = deque[GeneratorRecord]()
        self._sampling: Future[None] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        path = self.path(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        with best_effort("The timeline", path):
            known = timeline.truncate(path, trainer.global_step)
            self._now_s = known[-1].started_s + known[-1].seconds if known else 0.0
        # Else the update's kernels would be counted as the sync that waits for them.
        wait = partial(self.on_after_backward, trainer, pl_module)
        self._hook = trainer.optimizers[0].register_step_post_hook(lambda *_: wait())
        run = run_of(trainer)
        self._work.clear()
        self._sampling = run.loop.submit(sample(run.fleet.rollouts, self._work.append))

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if self._sampling is not None and self._sampling.done():
            self._sampling.result()  # raises its error
        times = times_of(trainer)
        stream = run_of(trainer).step_stream
        passes = [  # of rank 0
            MicroBatchRecord(
                seconds=seconds,
                tokens=sum(lengths),
                tokens_squared=sum(length * length for length in lengths),
            )
            for seconds, lengths in stream.passes
        ]
        step = step_record(times, stream, self._now_s)
        self._now_s += step.seconds
        work = [self._work.popleft() for _ in range(len(self._work))]
        groups = [timeline.group_record(group) for group in stream.groups]
        with best_effort("The timeline", path := self.path(trainer)):
            timeline.write(path, [*work, *passes, *groups, step], "a")

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self._sampling is not None:
            self._hook.remove()
            self._sampling.cancel()
            self._sampling = None

    @staticmethod
    def path(trainer: L.Trainer) -> Path:
        return run_folder(trainer) / "timeline.jsonl"


def step_record(times: StepTimes, stream: StepStream, started_s: float) -> StepRecord:
    """Returns the record of a step that has ended; the update gets what no other part has."""
    waits = times.trainer
    parts = {
        "wait_first_s": waits.get("wait_first", 0.0),
        "wait_more_s": waits.get("wait_next", 0.0),
        "wait_last_s": waits.get("wait_last", 0.0),
        "wait_reward_s": waits.get("wait_reward", 0.0),
        "train_s": sum(seconds for seconds, _ in stream.passes),
        "sync_s": times.sync,
    }
    rollouts = [rollout for group in stream.groups for rollout in group.rollouts]
    lags = Counter(stream.step - one for rollout in rollouts for one in rollout.policy_versions)
    return StepRecord(
        step=stream.step,
        started_s=started_s,
        seconds=times.step,
        update_s=times.step - sum(parts.values()),
        pause_s=times.sync_pause,
        generation_s=timeline.generation_s(stream.groups),
        tokens=stream.num_tokens,
        lags=dict(sorted(lags.items())),
        **parts,
    )


async def sample(pool: GeneratorPool, record: Callable[[GeneratorRecord], None]) -> None:
    """Samples the generators that write rollouts, on the fleet's loop, until it is cancelled."""
    known: dict[Generator, WorkIntervals] = {}
    while True:
        now = asyncio.get_running_loop().time()
        known = {one: known.get(one) or WorkIntervals(record) for one in pool.generators}
        for generator, intervals in known.items():
            intervals.add(now, generator.stats.snapshot())
        await asyncio.sleep(SAMPLE_S)


class WorkIntervals:
    """Intervals of one generator's work, from snapshots; calls `record` with each complete one.

    A generator sends the tokens of a second together, so an interval ends where they have just come:
    after a second, or before a break. Idle time and pauses are in no interval.
    """

    def __init__(self, record: Callable[[GeneratorRecord], None]) -> None:
        self._record = record
        self._first: tuple[float, StatsSnapshot] | None = None  # of the interval: (time, snapshot)
        nothing = StatsSnapshot(None, 0, up_to_date=False, read=0, responses=0, context_tokens=0)
        self._last = (0.0, nothing)
        self._response_s = self._context_s = 0.0  # integrals over the interval
        self._so_far: GeneratorRecord | None = None  # up to the last snapshot that was up to date

    def add(self, now: float, seen: StatsSnapshot) -> None:
        if self._first is None or seen.since is None or seen.since > self._first[0]:
            self._end()
            self._first = None if seen.since is None else (now, seen)
        else:  # trapezoidal rule between two snapshots
            before, then = self._last
            self._response_s += (now - before) * (then.responses + seen.responses) / 2
            self._context_s += (now - before) * (then.context_tokens + seen.context_tokens) / 2
            began, first = self._first
            if seen.up_to_date:
                self._so_far = GeneratorRecord(
                    seconds=now - began,
                    tokens=seen.written - first.written,
                    responses=self._response_s / (now - began),
                    context_tokens=self._context_s / (now - began),
                    prefill_tokens=seen.read - first.read,
                )
        self._last = (now, seen)
        if self._so_far is not None and self._so_far.seconds >= INTERVAL_S:
            self._end()
            self._first = (now, seen)

    def _end(self) -> None:
        """Records the interval, unless it is too short or no token came in it."""
        found, self._so_far = self._so_far, None
        self._response_s = self._context_s = 0.0
        if found is not None and found.seconds >= SHORTEST_S and found.tokens > 0:
            self._record(found)
