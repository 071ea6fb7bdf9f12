"""A model of the trainer: the real cuts, in the time that its costs say, and where that time goes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lrl.planning.costs import TrainerCosts
from lrl.planning.profiling.timeline import MicroBatchRecord, Record, StepRecord
from lrl.planning.profiling.wait_breakdown import by_cause, generation_s, group_record
from lrl.planning.simulator.fleet_model import ModelFleet
from lrl.planning.simulator.length_sampling import Runs
from lrl.rollouts.bin_packing import BinPacker, Rows
from lrl.rollouts.controller import Controller
from lrl.types import Group


@dataclass(slots=True)
class TrainedResponse:
    """A prompt and its response; see `lrl.rollouts.bin_packing.Packable`."""

    group: int
    tokens: int

    def __len__(self) -> int:
        return self.tokens


@dataclass(slots=True)
class StepWaits:
    """What a step trained, and when it was written."""

    tokens: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    groups: list[Group] = field(default_factory=list)


class ModelTrainer:
    """Trains steps, and syncs behind each.

    Args:
        costs: Seconds of its work.
        fleet: Who gets the weights.
        controller: Who has the groups.
        cuts: Makes the micro-batches of all ranks.
        oldest_lag: Tokens with a larger lag are masked; None trains all.
        alternates: Whether no micro-batch begins before the step's last group is there.
        record: Told of every step and micro-batch; None for nobody.
    """

    def __init__(
        self,
        costs: TrainerCosts,
        fleet: ModelFleet,
        controller: Controller,
        cuts: BinPacker[TrainedResponse],
        oldest_lag: int | None,
        alternates: bool,
        record: Callable[[Record], None] | None,
    ) -> None:
        self.costs = costs
        self.fleet = fleet
        self.controller = controller
        self.oldest_lag = oldest_lag
        self.alternates = alternates
        self._cuts = cuts
        self._done = [0.0] * len(cuts.squares)
        """When each rank has trained what it has got, on the loop's clock."""
        self._record = record
        self._delivery: asyncio.Task[float] | None = None
        """The pause of the last sync, where it is beside the next step."""
        self._loop = asyncio.get_running_loop()

    async def step(self, step: int) -> StepRecord:
        """Train step `step`, sync, and have the controller admit what may start then."""
        started = self._loop.time()
        waits, tally = list[tuple[float, int]](), StepWaits()
        train_s = await self._train(step, waits, tally)
        await asyncio.sleep(update_s := self.costs.update_s())
        sync_s, pause_s = await self._sync(step + 1)
        first_s, more_s, last_s = by_cause(waits, self._cuts.budget)
        record = StepRecord(
            step=step,
            started_s=started,
            seconds=self._loop.time() - started,
            wait_first_s=first_s,
            wait_more_s=more_s,
            wait_last_s=last_s,
            train_s=train_s,
            update_s=update_s,
            sync_s=sync_s,
            pause_s=pause_s,
            generation_s=generation_s(tally.groups),
            tokens=tally.tokens,
            lags=dict(sorted(tally.lags.items())),
        )
        if self._record is not None:
            for group in tally.groups:
                self._record(group_record(group))
            self._record(record)
        return record

    async def _train(self, step: int, waits: list[tuple[float, int]], tally: StepWaits) -> float:
        """All forward and backward passes of a step; their seconds."""
        train_s = 0.0
        for _ in range(self.controller.ledger.pacing.groups_in(step)):
            waiting = self._loop.time()
            group = await self.controller.next_group(step)
            waited_s = self._loop.time() - waiting
            waits.append((waited_s, self._take(group, step, tally)))
            if not self.alternates:
                for each in self._cuts.full():
                    train_s += await self._compute(each)
        for each in self._cuts.flush():
            train_s += await self._compute(each)
        others_s = max(0.0, max(self._done) - self._loop.time())
        await asyncio.sleep(others_s)
        return train_s + others_s

    def _take(self, group: Group, step: int, tally: StepWaits) -> int:
        """Cut from the group's responses what `Packer` would; their tokens, prompts included."""
        length = 0
        tally.groups.append(group)
        for rollout in group.rollouts:
            assert isinstance(rollout.versions, Runs)
            lags = Counter[int]()
            for version, tokens in rollout.versions.runs:
                lags[step - version] += tokens
            tally.lags += lags
            trained = sum(n for lag, n in lags.items() if self.oldest_lag is None or lag <= self.oldest_lag)
            tally.tokens += trained
            if trained:
                piece = TrainedResponse(group.index, len(group.prompt.token_ids) + len(rollout.token_ids))
                self._cuts.add(piece)
                length += len(piece)
        return length

    async def _compute(self, each: Sequence[Rows[TrainedResponse]]) -> float:
        """One forward and backward pass of every rank, which may still be at its last one; the seconds of rank 0's."""
        now, passes = self._loop.time(), {rank: self._pass(rows) for rank, rows in enumerate(each) if rows}
        for rank, one in passes.items():
            self._done[rank] = max(self._done[rank], now) + one.seconds
            if self._record is not None:
                self._record(one)
        seconds = passes[0].seconds if 0 in passes else 0.0
        await asyncio.sleep(seconds)
        return seconds

    def _pass(self, rows: Rows[TrainedResponse]) -> MicroBatchRecord:
        lengths = [len(piece) for row in rows for piece in row]
        tokens, squared = sum(lengths), sum(length * length for length in lengths)
        return MicroBatchRecord(
            seconds=self.costs.micro_batch_s(tokens, squared), tokens=tokens, tokens_squared=squared
        )

    async def _sync(self, version: int) -> tuple[float, float]:
        """Move the weights, then let more groups start; seconds of the sync, and of the longest pause in it.

        The trainer's work on a sync is done beside the writing generators as far as it is longer than their pause.
        Where the pause goes on beside the next step, that of the sync before is told; it is over before this begins.
        """
        started, costs = self._loop.time(), self.costs
        last_s, self._delivery = await self._delivery if self._delivery else 0.0, None
        pause_s = 0.0 if costs.goes_on else max(one.costs.sync_pause_s() for one in self.fleet.generators)
        await asyncio.sleep(max(0.0, costs.sync_s() - pause_s))
        if costs.goes_on and self.controller.ledger.pacing.max_lag > 0:
            self._delivery = asyncio.create_task(self._deliver(version))
        else:
            last_s = await self._deliver(version)
        return self._loop.time() - started, last_s

    async def _deliver(self, version: int) -> float:
        """Seconds of the pause."""
        pause_s = await self.fleet.sync(version)
        await self.controller.new_version(version)
        return pause_s
