"""The LightningDataModule of a run: prompts in, optimizer steps out. It owns the controller; its state is the ledger.

The loader has a length and is lazy. Without a length Lightning would fetch a step ahead of training it, which deadlocks
an on-policy run and skips a step at a resume.
"""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, TypeVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.advantages import Advantages, GroupMean
from lrl.generators.fleet import Fleet
from lrl.generators.pool import GeneratorPool
from lrl.rewards import RewardPool
from lrl.rewards.function import OneReward, as_list
from lrl.rollouts.controller import Controller
from lrl.rollouts.ledger import Ledger
from lrl.rollouts.pacing import Pacing
from lrl.rollouts.packing import Packer
from lrl.rollouts.prompts import Prompts
from lrl.rollouts.replay import Replay
from lrl.rollouts.step_observers import StepObservers
from lrl.rollouts.stream import RankStream, StepLoader, StepStream
from lrl.routing.dispatch import DispatchPolicy, LeastLoaded, Migration
from lrl.routing.length_predictor import LengthPredictor
from lrl.runtime import lightning_warnings
from lrl.runtime.config_errors import above, at_least, fault
from lrl.runtime.newest_checkpoint import check_best, newest_checkpoint
from lrl.runtime.stopwatch import Stopwatch
from lrl.strategies.base import raise_if_stopped
from lrl.types import Group, Sampling

T = TypeVar("T")

lightning_warnings.silence()


class WeightSyncing(Protocol):
    """The syncs of a run, as far as a waiting trainer must know them (`lrl.callbacks.WeightSync`)."""

    def poll(self, trainer: L.Trainer) -> None: ...
    def wait_until_verified(self, trainer: L.Trainer, pool: GeneratorPool) -> Any: ...


class RolloutDataModule(L.LightningDataModule):
    """Rollouts for a policy, as a loader whose every item is one optimizer step.

    Args:
        prompts: The data set: `lrl.Prompts`, the name of a data set on the hub or a file, or a list of rows.
        rewards: What scores a response: `lrl.rewards.Reward`s, Python callables, or their
            names (`module:function`, `file.py:function`); one alone or several.
        groups_per_step: Prompts that one optimizer step trains.
        rollouts_per_group: Responses to each prompt.
        max_lag: Most versions between the one that wrote a token and the one that trains it; 0 is on-policy.
        stragglers: What to do when a group has reached that bound and still runs: `wait` holds the trainer for it,
            `mask` goes on and masks the group's over-age tokens out of the loss when it comes.
        max_prompt_tokens: Longest prompt.
        max_response_tokens: Longest answer; with the prompt it is the generators' context length.
        temperature: Responses are sampled, and the policy's logits divided, with this.
        micro_batch_tokens: Most tokens (padding included) in one forward pass.
        advantages: The baseline; default `lrl.advantages.GroupMean`.
        max_skipped_per_step: Groups with equal rewards that are skipped and replaced by fresh prompts, at most this
            many per policy version; 0 trains them all. The steps of an epoch then use up more prompts than the data
            set has, and go on into the next shuffle.
        mask_truncated: Whether a response cut at `max_response_tokens` counts in the baseline alone, not in the loss.
        replay: Trains older groups again, beside a step's own; null never does.
        dispatch: Which generator answers which prompt, in which order; default `lrl.routing.dispatch.LeastLoaded`.
        moving: Lets half-written responses go on with idle generators; null never does.
        length_predictor: Learns which prompts have long responses; null does so only if `dispatch` or `migration` needs
            it.
        reward_workers: Processes that score responses.
        reward_timeout_s: Seconds a reward may take for one response.
        reward_memory_gib: What scoring may allocate in one of those processes, in GiB; null for no limit. Linux only.
        max_reward_failures: Largest share of the last few hundred responses that may get no reward, in (0, 1]; over it
            the run ends with an error. 1 never ends it.
        rollout_timeout_s: Seconds the responses to one prompt may take.
    """

    def __init__(
        self,
        prompts: Prompts | str | list[dict[str, Any]],
        rewards: Sequence[OneReward] | OneReward,
        groups_per_step: int = 16,
        rollouts_per_group: int = 8,
        max_lag: int = 1,
        stragglers: Literal["wait", "mask"] = "wait",
        max_prompt_tokens: int = 512,
        max_response_tokens: int = 512,
        temperature: float = 1.0,
        micro_batch_tokens: int = 8192,
        advantages: Advantages | None = None,
        max_skipped_per_step: int = 0,
        mask_truncated: bool = False,
        replay: Replay | None = None,
        dispatch: DispatchPolicy | None = None,
        migration: Migration | None = None,
        length_predictor: LengthPredictor | None = None,
        reward_workers: int = 1,
        reward_timeout_s: float = 10.0,
        reward_memory_gib: float | None = 4.0,
        max_reward_failures: float = 0.1,
        rollout_timeout_s: float = 1800.0,
    ) -> None:
        self._attached_to: L.Trainer | None = None  # Lightning sets `trainer` in its constructor
        super().__init__()
        self.stopwatch = Stopwatch()
        """What the trainer does at this moment (`lrl.runtime.stopwatch.TRAINER`)."""
        self.resumes_from: str | None = None
        """The checkpoint the run goes on from; known when the run is checked."""
        self.weight_sync: WeightSyncing | None = None
        """The run's syncs: the callback enters itself."""
        self.evaluations: list[Any] = []
        """What `trainer.validate` runs: each `lrl.callbacks.Evaluation` enters itself."""
        self.prompts = Prompts.coerce(prompts)
        self.rewards, self.rollout_timeout_s = as_list(rewards), rollout_timeout_s
        self.groups_per_step, self.max_lag, self.stragglers = groups_per_step, max_lag, stragglers
        self.max_prompt_tokens, self.micro_batch_tokens = max_prompt_tokens, micro_batch_tokens
        self.advantages = advantages or GroupMean()
        self.max_skipped_per_step, self.mask_truncated = max_skipped_per_step, mask_truncated
        self.replay, self.migration, self.dispatch = replay, migration, dispatch or LeastLoaded()
        self.length_predictor = length_predictor or (
            LengthPredictor() if migration or self.dispatch.needs_lengths else None
        )
        self._observers = StepObservers(self.advantages, replay, self.length_predictor)
        self.sampling = Sampling(n=rollouts_per_group, max_tokens=max_response_tokens, temperature=temperature)
        self.reward_pool = RewardPool(
            self.rewards, reward_workers, reward_timeout_s, reward_memory_gib, max_reward_failures
        )
        self._controller: Controller | None = None
        self._loaded: list[Prompts] = []
        self.step_stream: StepStream | None = None
        """The step that trains now, or has just been trained; callbacks of rank 0 read its groups and counts."""
        self._check()
        self._restored: dict[str, Any] | None = None

    def _check(self) -> None:
        """Refuses settings that no run could use."""
        sampling = self.sampling
        if sampling.n < 2:
            fault(
                f"data.rollouts_per_group is {sampling.n}; it must be at least 2: advantages are relative to the group."
            )
        if not 0 < sampling.temperature < float("inf"):
            fault(
                f"data.temperature is {sampling.temperature}: greedy responses have no log-prob to learn from. Use 1.0."
            )
        at_least(0, "data", max_lag=self.max_lag, max_skipped_per_step=self.max_skipped_per_step)
        at_least(1, "data", groups_per_step=self.groups_per_step, micro_batch_tokens=self.micro_batch_tokens)
        at_least(1, "data", max_prompt_tokens=self.max_prompt_tokens, max_response_tokens=sampling.max_tokens)
        above(0, "data", rollout_timeout_s=self.rollout_timeout_s)

    @property
    def max_model_tokens(self) -> int:
        """Context length that the generators need."""
        return self.max_prompt_tokens + self.sampling.max_tokens

    def setup(self, stage: str) -> None:
        """Load the prompts and start the reward workers before any server: what is wrong with them is said now."""
        if stage == "fit" and self._trainer.is_global_zero:
            self.load(self.prompts)
            self.reward_pool.start(next(iter(self.prompts)))
            self._observers.start()

    def load(self, prompts: Prompts) -> None:
        """Load a data set with the policy's tokenizer."""
        prompts.load(self._policy.tokenizer, self.max_prompt_tokens)
        self._loaded.append(prompts)

    def probe_tokens(self, count: int) -> list[int]:
        """At most `count` tokens of real prompts, always the same: what a probe asks the log-probs of."""
        return [token for prompt in islice(self._loaded[0], count) for token in prompt.token_ids][:count]

    def teardown(self, stage: str) -> None:
        """End the helper processes. The controller ended with the fleet's loop; the next run makes its own."""
        self.reward_pool.close()
        self._observers.close()
        self._restored, self._controller = self._ledger_state(), None
        self._loaded.clear()

    def on_exception(self, exception: BaseException) -> None:
        """End the helper processes: Lightning does not call `teardown` after an error."""
        self.reward_pool.close()
        self._observers.close()

    @property
    def controller(self) -> Controller:
        """The run's controller, made at its first use: by then the generators answer."""
        if self._controller is None:
            self._controller = self._make_controller()
        return self._controller

    def _make_controller(self) -> Controller:
        self.fleet.rollouts.requests.use(self.dispatch, self.migration, self.length_predictor)
        controller = Controller(
            self.prompts,
            self.fleet.rollouts,
            self.reward_pool,
            Ledger(self.pacing),
            self.sampling,
            self.decode,
            self.rollout_timeout_s,
            self.max_skipped_per_step,
            self.advantages.min_rollouts,
        )
        # A trainer without a checkpoint begins at step 0: what an earlier fit left behind is not its own.
        if self._restored is not None and self._restored["steps_done"] == self._trainer.global_step:
            controller.load_state_dict(self._restored)
            if controller.resumed:
                rank_zero_info(str(controller.resumed))
        self._restored = None
        return controller

    @property
    def pacing(self) -> Pacing:
        """When groups may start, and by when they must be trained."""
        max_steps = self._trainer.max_steps
        return Pacing(
            prompts_per_epoch=max(1, len(self.prompts)),
            groups_per_step=self.groups_per_step,
            max_lag=self.max_lag,
            last_step=max_steps if max_steps > 0 else None,
            wait_for_stragglers=self.stragglers == "wait",
        )

    def new_version(self, version: int) -> None:
        """The generators hold `version` now: pacing admits more prompts."""
        self.fleet.call(self._new_version(version), f"admitting prompts for version {version}")

    async def _new_version(self, version: int) -> None:
        await self.controller.new_version(version)
        self._observers.look_ahead(self.controller.next_prompts())

    def train_dataloader(self) -> StepLoader:
        """The loader of optimizer steps; rank 0 tells the others how many an epoch has."""
        leads, ranks = self._trainer.is_global_zero, self._strategy.ranks
        steps: int = self._strategy.broadcast(self.pacing.steps_per_epoch if leads else None)
        return StepLoader(steps, lambda: self.next_step(self._trainer.global_step) if leads else RankStream(ranks))

    def next_step(self, step: int) -> StepStream:
        """The stream of optimizer step `step`, on the rank that has the generators."""
        oldest = step - self.max_lag if self.stragglers == "mask" else None
        whole = self._policy.objective.whole_groups
        temperature, ranks = self.sampling.temperature, self._strategy.ranks
        packer = Packer(
            self.micro_batch_tokens,
            self.advantages,
            temperature,
            oldest,
            whole,
            self.mask_truncated,
            ranks.size,
            self._policy.responses_share_rows,
        )
        self.step_stream = StepStream(
            lambda: self._next_group(step),
            self.pacing.groups_in(step),
            packer,
            step,
            self.controller.ledger.give_up,
            lambda group: self._policy.prepare(group, temperature, self.micro_batch_tokens),
            lambda groups: self._observers.end_step(step, groups),
            self.stopwatch,
            self._strategy.placement == "shared",
            self.replay.draw(step) if self.replay else (),
            ranks,
        )
        return self.step_stream

    def _next_group(self, step: int) -> Group:
        return self.fleet.loop.wait(
            self.controller.next_group(step),
            self.rollout_timeout_s * 2,
            f"waiting for a finished group for step {step}",
            self.look,
        )

    def state_dict(self) -> dict[str, Any]:
        """The ledger after the steps that are done, in plain types and tensors; rank 0's is saved."""
        self._wait_until_verified()
        return self._observers.state_dict() | {"ledger": self._ledger_state()}

    def _ledger_state(self) -> dict[str, Any] | None:
        """The controller's state; before there is one, what was loaded."""
        if self._controller is None:
            return self._restored
        controller, step = self._controller, self._trainer.global_step
        return self._on_the_loop(lambda: controller.state_dict(step), f"saving the ledger after step {step}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind what was trained."""
        self._restored = state_dict["ledger"]
        self._observers.load_state_dict(state_dict)

    # ---- the run around it

    @property
    def trainer(self) -> L.Trainer | None:
        """The trainer of the run; setting it is the last thing Lightning does before it looks for a checkpoint."""
        return self._attached_to

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        self._attached_to = trainer
        if isinstance(trainer, L.Trainer):
            connector: Any = trainer._checkpoint_connector
            connector._parse_ckpt_path = partial(self._find_checkpoint, trainer)

    def _find_checkpoint(self, trainer: L.Trainer, verb: TrainerFn, ckpt_path: Any, **how: bool) -> Any:
        """Finds the checkpoint as Lightning does, but for `last` (`newest_checkpoint`), and keeps its path."""
        check_best(trainer, ckpt_path)
        connector: Any = trainer._checkpoint_connector
        lightnings = type(connector)._parse_ckpt_path
        found = newest_checkpoint(trainer) if ckpt_path == "last" else lightnings(connector, verb, ckpt_path, **how)
        self.resumes_from = None if found is None else str(found)
        return found

    @property
    def fleet(self) -> Fleet:
        """The run's generators."""
        if self._strategy.fleet is None:
            raise RuntimeError(
                "There are no generators: only rank 0 has them, and the trainer's strategy must be "
                "lrl.AsyncSingleDevice or lrl.AsyncDDP."
            )
        return self._strategy.fleet

    @property
    def trains(self) -> bool:
        """Whether the run is to train, as far as it is known: without a trainer, yes."""
        return self.trainer is None or self.trainer.state.fn == "fit"

    def val_dataloader(self) -> Sequence[Any]:
        """One item per `lrl.callbacks.Evaluation`; none within fit, where they run beside the training."""
        if self._trainer.state.fn == "fit":
            return []
        # Not a list: Lightning takes what a list holds, however deeply, for loaders.
        return UserList(self.evaluations)

    def decode(self, token_ids: list[int]) -> str:
        """Text of a response, special tokens left out."""
        return self._policy.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _on_the_loop(self, read: Callable[[], T], what: str) -> T:
        """What `read` returns, called where no task writes meanwhile: on the fleet's loop, or here when that has ended.

        Raises:
            TimeoutError: The loop did not get to it in time; names `what`.
        """
        fleet = self._strategy.fleet
        if fleet is None or fleet.loop.closed:
            return read()

        async def on_the_loop() -> T:
            return read()

        return fleet.call(on_the_loop(), what)

    def look(self) -> None:
        """What a waiting trainer does a few times a second: end if told to, and take in generators that came back."""
        raise_if_stopped(self._trainer)
        if self.weight_sync is not None:
            self.weight_sync.poll(self._trainer)

    def _wait_until_verified(self) -> None:
        """Wait until all that is written is by weights that are proved: nothing else is saved."""
        fleet = None if self.trainer is None else self._strategy.fleet
        if fleet is not None and self.weight_sync is not None:
            self.weight_sync.wait_until_verified(self._trainer, fleet.rollouts)

    @property
    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError("RolloutDataModule is used by a Trainer: call trainer.fit(module, data).")
        return self.trainer

    @property
    def _strategy(self) -> Any:
        return self._trainer.strategy

    @property
    def _policy(self) -> Any:
        return self._trainer.lightning_module
