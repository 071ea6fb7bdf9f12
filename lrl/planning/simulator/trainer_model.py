"""A model of the trainer: the real packing, with modelled compute time, and a breakdown of each
step's time."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lrl.planning.costs import TrainerCosts
from lrl.planning.profiling import timeline
from lrl.planning.profiling.timeline import MicroBatchRecord, Record, StepRecord
from lrl.planning.simulator.fleet_model import ModelFleet
from lrl.planning.simulator.run_lengths import RunLengths
from lrl.rollouts.bin_packing import BinPacker, Rows
from lrl.rollouts.controller import Controller
from lrl.training.tree_cost import tree_lengths
from lrl.types import ENVIRONMENT, Group


@dataclass(slots=True)
class TrainedTree:
    """Responses behind their prompt, or a single one (`lrl.rollouts.bin_packing.Packable`)."""

    group: int
    tokens: int

    def __len__(self) -> int:
        return self.tokens


@dataclass(slots=True)
class StepTally:
    """Groups and tokens of the current step."""

    tokens: int = 0
    lags: Counter[int] = field(default_factory=Counter)
    groups: list[Group] = field(default_factory=list)
    waits: list[tuple[float, int]] = field(default_factory=list)
    """Of each group: seconds waited for it, and its trained tokens, prompts included."""


@dataclass
class ModelTrainer:
    """Trains steps, and syncs after each."""

    costs: TrainerCosts
    fleet: ModelFleet
    controller: Controller
    cuts: BinPacker[TrainedTree]
    """Makes the micro-batches of all ranks."""
    oldest_lag: int | None
    """Tokens with a larger lag are masked; None trains all."""
    alternates: bool
    """Whether no micro-batch begins before the step's last group is there."""
    attention_tokens: int
    """See `lrl.training.tree_cost`; 0 if each response carries its own prompt."""
    record: Callable[[Record], None]
    """Called with the record of every step, group and micro-batch."""

    def __post_init__(self) -> None:
        # End of each rank's last micro-batch, on the loop's clock.
        self._done = [0.0] * len(self.cuts.squares)
        # The last sync's pause, if it overlaps the next step.
        self._delivery: asyncio.Task[float] | None = None
        self._loop = asyncio.get_running_loop()

    async def step(self, step: int) -> StepRecord:
        """Trains step `step`, syncs, and has the controller admit the next groups."""
        started, tally = self._loop.time(), StepTally()
        train_s = await self._train(step, tally)
        update_s = self.costs.update_s()
        await asyncio.sleep(update_s)
        sync_s, pause_s = await self._sync(step + 1)
        first_s, more_s, last_s = timeline.split_waits(tally.waits, self.cuts.budget)
        done = StepRecord(
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
            generation_s=timeline.generation_s(tally.groups),
            tokens=tally.tokens,
            attention_tokens=self.attention_tokens,
            lags=dict(sorted(tally.lags.items())),
        )
        for group in tally.groups:
            self.record(timeline.group_record(group))
        self.record(done)
        return done

    async def _train(self, step: int, tally: StepTally) -> float:
        """Runs all forward and backward passes of a step; returns their seconds."""
        train_s = 0.0
        for _ in range(self.controller.ledger.pacing.groups_in(step)):
            waiting = self._loop.time()
            group = await self.controller.next_group(step)
            waited_s = self._loop.time() - waiting
            tally.waits.append((waited_s, self._take(group, step, tally)))
            if not self.alternates:
                for each in self.cuts.full():
                    train_s += await self._compute(each)
        for each in self.cuts.flush():
            train_s += await self._compute(each)
        others_s = max(0.0, max(self._done) - self._loop.time())
        await asyncio.sleep(others_s)
        return train_s + others_s

    def _take(self, group: Group, step: int, tally: StepTally) -> int:
        """Adds the group's trees to the cuts as `Packer` would; returns their tokens."""
        prompt = len(group.prompt.token_ids)
        lengths = []
        tally.groups.append(group)
        for rollout in group.rollouts:
            assert isinstance(rollout.versions, RunLengths)
            lags = Counter[int]()
            for version, tokens in rollout.versions.runs:
                if version != ENVIRONMENT:
                    lags[step - version] += tokens
            tally.lags += lags
            trained = sum(
                n for lag, n in lags.items() if self.oldest_lag is None or lag <= self.oldest_lag
            )
            tally.tokens += trained
            if trained:
                lengths.append(prompt + len(rollout.token_ids))
        trees = tree_lengths(
            lengths,
            prompt - 1,
            longest=self.cuts.micro_batch_tokens,
            attention_tokens=self.attention_tokens,
        )
        for tokens in trees:
            self.cuts.add(TrainedTree(group.index, tokens))
        return sum(trees)

    async def _compute(self, each: Sequence[Rows[TrainedTree]]) -> float:
        """Runs a micro-batch on every rank, after the rank's previous one; returns the seconds of
        rank 0's."""
        now, rank_0_s = self._loop.time(), 0.0
        for rank, rows in enumerate(each):
            if not rows:
                continue
            lengths = [len(piece) for row in rows for piece in row]
            tokens = sum(lengths)
            squared = sum(length * length for length in lengths)
            seconds = self.costs.micro_batch_s(tokens, squared)
            self._done[rank] = max(self._done[rank], now) + seconds
            self.record(MicroBatchRecord(seconds=seconds, tokens=tokens, tokens_squared=squared))
            if rank == 0:
                rank_0_s = seconds
        await asyncio.sleep(rank_0_s)
        return rank_0_s

    async def _sync(self, version: int) -> tuple[float, float]:
        """Moves the weights and admits more groups; returns the seconds of the sync, and of its
        longest pause.

        The trainer's work beyond the pause runs while the generators still write. If the pause
        overlaps the next step, the returned pause is of the sync before, which ends before this one
        begins.
        """
        started, costs = self._loop.time(), self.costs
        last_s = await self._delivery if self._delivery else 0.0
        self._delivery = None
        pause_s = (
            0.0
            if costs.pause_overlaps
            else max(one.costs.sync_pause_s() for one in self.fleet.generators)
        )
        await asyncio.sleep(max(0.0, costs.sync_s() - pause_s))
        if costs.pause_overlaps and self.controller.ledger.pacing.max_lag > 0:
            self._delivery = asyncio.create_task(self._deliver(version))
        else:
            last_s = await self._deliver(version)
        return self._loop.time() - started, last_s

    async def _deliver(self, version: int) -> float:
        """Gives the fleet the version; returns the seconds of the pause."""
        pause_s = await self.fleet.sync(version)
        await self.controller.new_version(version)
        return pause_s
