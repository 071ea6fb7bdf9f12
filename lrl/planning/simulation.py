"""The real controller, pacing, dispatch and packing on a virtual clock, with models of generators
and trainer.

    admit -> generate -> queue -> micro-batches as groups arrive -> update -> sync -> admit ...

The trainer computes one micro-batch at a time, starts each as soon as it is full, and syncs after
every step: first the work that runs while the generators write, then their pause. Rewards take no
time. Episodes, failures of generators, proofs and deadlines are not modelled.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lrl.planning import clock
from lrl.planning.costs import GeneratorCosts, TrainerCosts
from lrl.planning.generator_model import ModelGenerator, SimulatedResponse
from lrl.planning.workload import Lognormal
from lrl.rollouts.controller import Controller
from lrl.rollouts.ledger import Ledger, Pacing
from lrl.rollouts.packing import BinPacker
from lrl.rollouts.timeline import MicroBatchRecord, Record, StepRecord, generation_s, group_record
from lrl.routing.dispatch import DispatchPolicy, LeastLoaded, Request
from lrl.routing.request_queue import RequestQueue
from lrl.training.prefix_tree import tree_lengths
from lrl.types import Group, Prompt, Rollout, Sampling

UNLIMITED = 2**62
"""Tokens and prompts that nothing limits."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A run to forecast. Settings have their names and meanings in a run."""

    generators: Sequence[GeneratorCosts]
    trainer: TrainerCosts
    lengths: Lognormal
    steps: int
    groups_per_step: int = 16
    rollouts_per_group: int = 8
    max_lag: int = 1
    stragglers: Literal["wait", "mask"] = "wait"
    micro_batch_tokens: int = 8192
    """Of all ranks together, whose costs the trainer's are."""
    max_num_seqs: int = 256
    prompt_tokens: int = 256
    """Of every prompt."""
    dispatch: Callable[[], DispatchPolicy] = LeastLoaded
    placement: Literal["split", "shared"] = "split"
    """`shared`: both sides have all devices, and none trains while responses are written."""
    attention_tokens: int = 0
    """See `lrl.training.prefix_tree`; 0 gives each response its own prompt in training."""

    def __post_init__(self) -> None:
        if self.placement == "shared" and self.max_lag:
            raise ValueError(
                f"max_lag is {self.max_lag} with placement shared, which alternates; set it to 0."
            )

    def run(self, record: Callable[[Record], None] = lambda record: None) -> Forecast:
        """Simulates the run; calls `record` with every record of the timeline."""
        return clock.run(self._run(record))

    async def _run(self, record: Callable[[Record], None]) -> Forecast:
        pacing = Pacing(
            prompts_per_epoch=UNLIMITED,
            groups_per_step=self.groups_per_step,
            max_lag=self.max_lag,
            last_step=self.steps,
            wait_for_stragglers=self.stragglers == "wait",
        )
        fleet = ModelFleet(self, record)
        controller = Controller(
            ModelPrompts(self.prompt_tokens),
            fleet.generate,
            no_reward,
            ledger=Ledger(pacing),
            sampling=Sampling(n=self.rollouts_per_group, max_tokens=UNLIMITED),
            deadline_s=float("inf"),
        )
        trainer = ModelTrainer(self, fleet, controller, record)
        await controller.new_version(0)
        steps = [await trainer.step(number) for number in range(self.steps)]
        for generator in fleet.generators:
            generator.end()
        return Forecast(steps, fleet.generators)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The result of a simulated run."""

    steps: list[StepRecord]
    generators: list[ModelGenerator]

    @property
    def seconds(self) -> float:
        return self.steps[-1].started_s + self.steps[-1].seconds

    @property
    def lags(self) -> Counter[int]:
        """lag -> trained response tokens of that lag."""
        return sum((Counter(step.lags) for step in self.steps), Counter())


@dataclass(frozen=True, slots=True)
class ModelPrompts:
    """Endless prompts with a length and no words."""

    prompt_tokens: int

    def __getitem__(self, index: int) -> Prompt:
        tokens: Any = range(self.prompt_tokens)
        return Prompt(id=index, token_ids=tokens, text="")


async def no_reward(prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
    """Gives every response the reward 0 at once."""
    for rollout in rollouts:
        rollout.reward = 0.0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Stands for a response's lists of tokens, whose 20,000 versions would take 160 kB."""

    runs: Sequence[tuple[int, int]]
    """(version, how many tokens it wrote), in order."""

    def __len__(self) -> int:
        return sum(count for _, count in self.runs)

    def count(self, version: int) -> int:
        return sum(count for one, count in self.runs if one == version)


def runs_of(rollout: Rollout) -> Sequence[tuple[int, int]]:
    """Returns the versions that wrote a finished rollout: (version, tokens) in order."""
    tokens: Any = rollout.versions
    runs: Sequence[tuple[int, int]] = tokens.runs
    return runs


class ModelFleet:
    """The real request queue and dispatch before models of generators. A response's tokens appear
    at its end."""

    def __init__(self, scene: Simulation, record: Callable[[Record], None]) -> None:
        self.generators = [
            ModelGenerator(costs, scene.max_num_seqs, record) for costs in scene.generators
        ]
        self.requests = RequestQueue(
            scene.dispatch(), lambda: [one for one in self.generators if one.serving]
        )
        self.lengths = scene.lengths
        self._arrivals = 0

    async def generate(
        self,
        prompt: Prompt,
        rollouts: list[Rollout],
        sampling: Sampling,
        *,
        priority: int,
        due: int,
        ended: Callable[[], None] = lambda: None,
        **how: Any,
    ) -> None:
        """See `GeneratorPool.generate`; the rollouts have no token yet."""
        whole = asyncio.get_running_loop().create_future()
        rollout_of: dict[SimulatedResponse, Rollout] = {}

        def one_ended(response: SimulatedResponse) -> None:
            rollout, tokens = rollout_of.pop(response), Tokens(response.versions)
            rollout.token_ids = rollout.versions = rollout.logprobs = tokens  # type: ignore[assignment]
            rollout.finish_reason = "stop"
            self.requests.release(generator)
            ended()
            if not rollout_of:
                whole.set_result(None)

        while not whole.done():
            request = Request(prompt, rollouts, priority, due)
            generator = await self.requests.enter(request)
            try:
                if not generator.serving:  # it has closed since the dispatch
                    continue
                lengths = self.lengths.of(prompt.id, priority, len(rollouts))
                for length, rollout in zip(lengths, rollouts, strict=True):
                    self._arrivals += 1
                    order = priority, self._arrivals
                    response = SimulatedResponse(len(prompt.token_ids), length, order, one_ended)
                    rollout_of[response] = rollout
                generator.write(list(rollout_of))
                await whole
            finally:
                self.requests.leave(generator, request)

    async def sync(self, version: int) -> float:
        """Pauses all generators and resumes them with `version`; returns the longest pause."""
        loop = asyncio.get_running_loop()

        async def one(generator: ModelGenerator) -> float:
            await generator.pause()
            paused_at = loop.time()
            await asyncio.sleep(generator.costs.sync_pause_s)
            return paused_at

        paused_at = await asyncio.gather(*map(one, self.generators))
        for generator in self.generators:
            generator.resume(version)
        self.requests.send_soon()
        return loop.time() - min(paused_at)


@dataclass
class ModelTrainer:
    """Trains steps with the real packing, and syncs after each."""

    scene: Simulation
    fleet: ModelFleet
    controller: Controller
    record: Callable[[Record], None]

    def __post_init__(self) -> None:
        self.costs = self.scene.trainer
        self._cuts: Any = BinPacker(self.scene.micro_batch_tokens)
        # The last sync's pause, if it overlaps the next step.
        self._delivery: asyncio.Task[float] | None = None
        self._loop = asyncio.get_running_loop()

    async def step(self, step: int) -> StepRecord:
        started = self._loop.time()
        groups, waits, train_s = list[Group](), list[float](), 0.0
        for _ in range(self.controller.ledger.pacing.groups_in(step)):
            waiting = self._loop.time()
            groups.append(await self.controller.next_group(step))
            waits.append(self._loop.time() - waiting)
            self._take(groups[-1], step)
            if self.scene.placement == "split":
                for (rows,) in self._cuts.full():
                    train_s += await self._compute(rows)
        for (rows,) in self._cuts.flush():
            train_s += await self._compute(rows)
        await asyncio.sleep(self.costs.update_s)
        sync_s, pause_s = await self._sync(step + 1)
        lags = Counter[int]()
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            for version, tokens in runs_of(rollout):
                lags[step - version] += tokens
        done = StepRecord(
            step=step,
            started_s=started,
            seconds=self._loop.time() - started,
            wait_first_s=waits[0],
            wait_more_s=sum(waits[1:-1]),
            wait_last_s=sum(waits[1:][-1:]),
            train_s=train_s,
            update_s=self.costs.update_s,
            sync_s=sync_s,
            pause_s=pause_s,
            generation_s=generation_s(groups),
            tokens=sum(tokens for lag, tokens in lags.items() if self._trains(lag)),
            lags=dict(sorted(lags.items())),
        )
        for group in groups:
            self.record(group_record(group))
        self.record(done)
        return done

    def _trains(self, lag: int) -> bool:
        return self.scene.stragglers == "wait" or lag <= self.scene.max_lag

    def _take(self, group: Group, step: int) -> None:
        """Adds the group's trees to the cuts as `Packer` would."""
        prompt = len(group.prompt.token_ids)
        lengths = [
            prompt + len(rollout.token_ids)
            for rollout in group.rollouts
            if any(n and self._trains(step - version) for version, n in runs_of(rollout))
        ]
        trees = tree_lengths(
            lengths,
            prompt - 1,
            longest=self._cuts.micro_batch_tokens,
            attention_tokens=self.scene.attention_tokens,
        )
        for tokens in trees:
            self._cuts.add(range(tokens))

    async def _compute(self, rows: Sequence[Any]) -> float:
        """Runs a micro-batch; returns its seconds."""
        lengths = [len(piece) for row in rows for piece in row]
        tokens = sum(lengths)
        squared = sum(length * length for length in lengths)
        seconds = self.costs.micro_batch_s(tokens, squared)
        self.record(MicroBatchRecord(seconds=seconds, tokens=tokens, tokens_squared=squared))
        await asyncio.sleep(seconds)
        return seconds

    async def _sync(self, version: int) -> tuple[float, float]:
        """Moves the weights and admits more groups; returns the seconds of the sync and of its
        longest pause, or of the sync before if the pause overlaps the next step."""
        started, overlaps = self._loop.time(), self.costs.pause_overlaps
        last_s = await self._delivery if self._delivery else 0.0
        self._delivery = None
        pauses = [0.0 if overlaps else one.costs.sync_pause_s for one in self.fleet.generators]
        await asyncio.sleep(max(0.0, self.costs.sync_s - max(pauses)))
        if overlaps and self.scene.max_lag > 0:
            self._delivery = asyncio.create_task(self._deliver(version))
        else:
            last_s = await self._deliver(version)
        return self._loop.time() - started, last_s

    async def _deliver(self, version: int) -> float:
        pause_s = await self.fleet.sync(version)
        await self.controller.new_version(version)
        return pause_s
