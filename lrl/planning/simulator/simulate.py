"""The real controller, pacing, dispatch and packing on a virtual clock, with models of generators
and trainer.

    admit -> generate -> queue -> micro-batches as groups arrive -> update -> sync -> admit ...

The trainer computes one micro-batch at a time, starts each as soon as it is full, and syncs after
every step in the order of `lrl.weights.sync`: first the work that runs while the generators write, then
their pause. Rewards take no time. Episodes are played by the real loop, with a model of their
environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lrl.planning.costs import GeneratorCosts, TrainerCosts
from lrl.planning.profiling.timeline import Record, StepRecord
from lrl.planning.simulator import clock
from lrl.planning.simulator.episode_model import EpisodeShapes, ModelEpisodes
from lrl.planning.simulator.fleet_model import ModelFleet
from lrl.planning.simulator.generator_model import ModelGenerator
from lrl.planning.simulator.length_sampling import LengthSampler
from lrl.planning.simulator.run_lengths import RunLengths
from lrl.planning.simulator.trainer_model import ModelTrainer, TrainedTree
from lrl.rollouts.bin_packing import BinPacker
from lrl.rollouts.controller import Controller, ResponseWriter
from lrl.rollouts.ledger import Ledger
from lrl.rollouts.pacing import Pacing
from lrl.routing.dispatch import DispatchPolicy, LeastLoaded
from lrl.types import Prompt, Rollout, Sampling


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A run to forecast. Settings have their names and meanings in a run.

    Args:
        generators: Costs of each.
        trainer: Its costs.
        lengths: Distribution of the responses; with `episodes`, of their turns.
        steps: Optimizer steps.
        groups_per_step: Prompts that a step trains.
        rollouts_per_group: Responses to each.
        max_lag: Most versions between the one that wrote a token and the one that trains it.
        stragglers: Treatment of an unfinished group at that bound; see `RolloutDataModule`.
        micro_batch_tokens: Most tokens in one forward pass, padding included.
        ranks: Trainer ranks, which train a micro-batch each at the same time.
        max_num_seqs: Responses that a generator writes at once.
        prompt_tokens: Length of every prompt.
        prompts: Prompts in the data set.
        dispatch: Makes the dispatch policy.
        placement: `split` gives trainer and generators separate devices. `shared` alternates on the
            same ones: no micro-batch begins while responses are being written, and max_lag must be
            0; both sides then have the costs of all devices.
        episodes: How episodes go on after their first turns; None for responses of a single turn.
        prefix_cache: Whether a later turn reads only what is new; else the whole episode.
        keys_and_values: What a generator does with that cache at a sync; see `WeightSync`.
        attention_tokens: How many responses share a prompt in training, see
            `lrl.training.tree_cost`; 0 gives each its own.

    Raises:
        ValueError: A setting is outside its range, or max_lag is not 0 on shared devices.
    """

    generators: Sequence[GeneratorCosts]
    trainer: TrainerCosts
    lengths: LengthSampler
    steps: int
    groups_per_step: int = 16
    rollouts_per_group: int = 8
    max_lag: int = 1
    stragglers: Literal["wait", "mask"] = "wait"
    micro_batch_tokens: int = 8192
    ranks: int = 1
    max_num_seqs: int = 256
    prompt_tokens: int = 256
    prompts: int = 1_000_000
    dispatch: Callable[[], DispatchPolicy] = LeastLoaded
    placement: Literal["split", "shared"] = "split"
    episodes: EpisodeShapes | None = None
    prefix_cache: bool = True
    keys_and_values: Literal["recompute", "keep"] = "recompute"
    attention_tokens: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "rollouts_per_group", "ranks", "max_num_seqs", "prompt_tokens")
        for name in (*counts, "micro_batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not self.generators:
            raise ValueError("generators is empty; without a generator nothing is written.")
        if self.placement == "shared" and self.max_lag:
            raise ValueError(
                f"max_lag is {self.max_lag} with placement shared, which alternates; set it to 0."
            )

    def run(self, record: Callable[[Record], None] = lambda record: None) -> Forecast:
        """Simulates the run; calls `record` with every record of the timeline."""
        return clock.run(self._run(record))

    async def _run(self, record: Callable[[Record], None]) -> Forecast:
        pacing = Pacing(
            prompts_per_epoch=self.prompts,
            groups_per_step=self.groups_per_step,
            max_lag=self.max_lag,
            last_step=self.steps,
            wait_for_stragglers=self.stragglers == "wait",
        )
        fleet = ModelFleet(
            self.generators,
            capacity=self.max_num_seqs,
            lengths=self.lengths,
            dispatch=self.dispatch(),
            record=record,
            prefix_cache=self.prefix_cache,
            keeps_cache=self.keys_and_values == "keep",
        )
        writer: ResponseWriter = fleet
        if self.episodes is not None:
            writer = ModelEpisodes(fleet.generate, self.episodes, self.lengths)
        controller = Controller(
            ModelPrompts(self.prompts, self.prompt_tokens),
            writer,
            rewards=NoRewards(),
            ledger=Ledger(pacing),
            sampling=Sampling(n=self.rollouts_per_group, max_tokens=2**62),
            decode=lambda tokens, before: "",
            deadline_s=float("inf"),
        )
        trainer = ModelTrainer(
            self.trainer,
            fleet,
            controller,
            BinPacker[TrainedTree](self.micro_batch_tokens, ranks=self.ranks),
            oldest_lag=self.max_lag if self.stragglers == "mask" else None,
            alternates=self.placement == "shared",
            attention_tokens=self.attention_tokens,
            record=record,
        )
        await controller.new_version(0)
        steps = [await trainer.step(number) for number in range(self.steps)]
        for generator in fleet.generators:
            generator.end()
        reuse = fleet.reused / fleet.later_turns if fleet.later_turns else None
        return Forecast(steps, fleet.generators, reuse)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The result of a simulated run."""

    steps: list[StepRecord]
    generators: list[ModelGenerator]
    """At the run's end: seconds busy, idle and paused, and tokens, of each."""
    prefix_reuse: float | None
    """Share of later turns that found their episode in the generator's prefix cache; None without
    any."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        return self.steps[-1].started_s + self.steps[-1].seconds

    @property
    def busy(self) -> float:
        """Share of the run in which a generator prefills or decodes, mean over all."""
        return sum(one.busy_s for one in self.generators) / (self.seconds * len(self.generators))

    @property
    def lags(self) -> Counter[int]:
        """lag -> trained response tokens of that lag."""
        return sum((Counter(step.lags) for step in self.steps), Counter())


@dataclass(frozen=True, slots=True)
class ModelPrompts:
    """Endless prompts with a length and no words."""

    prompts: int
    prompt_tokens: int

    def __getitem__(self, index: int) -> Prompt:
        tokens: Any = RunLengths([(0, self.prompt_tokens)])
        return Prompt(id=index % self.prompts, token_ids=tokens, text="")


class NoRewards:
    """Gives every response the reward 0 at once (`lrl.rollouts.controller.Scorer`)."""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Sets the reward of each rollout."""
        for rollout in rollouts:
            rollout.reward = 0.0
