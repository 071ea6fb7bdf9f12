"""LightningDataModule of a run: prompts in, optimizer steps out. It owns the controller; its state
is the ledger."""

import inspect
from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.advantages import Advantages, GroupMean
from lrl.checkpoints.made_with import Settings, changes
from lrl.checkpoints.resume import find_by_lrl
from lrl.environments import Environment
from lrl.errors import ConfigError, above, answers_aliases, at_least, instances, one_of
from lrl.generators.pool import GeneratorPool
from lrl.members.launchers import Launcher
from lrl.rewards import Reward, RewardPool, TurnRewards
from lrl.rewards.base import OneReward, as_list
from lrl.rollouts.controller import Controller, Score, Write, score
from lrl.rollouts.learners import Learners, Replay, settings_of
from lrl.rollouts.ledger import Ledger, Pacing
from lrl.rollouts.packing import Packer
from lrl.rollouts.policy_text import PolicyText
from lrl.rollouts.prompts import Prompts
from lrl.rollouts.stream import ControllerCalls
from lrl.routing.dispatch import DispatchPolicy, LeastLoaded
from lrl.routing.length_predictor import LengthPredictor
from lrl.routing.migration import Migration
from lrl.system import output
from lrl.types import LEAST_TEMPERATURE, Sampling, Step
from lrl.workers.worker import START_TIMEOUT_S

if TYPE_CHECKING:
    from lrl.generators.tool_calls import ToolCallParser
    from lrl.policy_model import PolicyModel
    from lrl.rollouts.episodes.environment_of_run import EnvironmentOfRun
    from lrl.run import Run

output.silence()

Stragglers = Literal["wait", "mask"]


class RolloutDataModule(L.LightningDataModule):
    """Rollouts for a policy, as a loader of optimizer steps.

    Args:
        prompts: The data set: `lrl.Prompts`, the name of a data set on the hub or a file, or a list
            of rows.
        rewards: One or several rewards: `lrl.rewards.Reward`s, Python callables, or their names
            (`module:function`, `file.py:function`). With an environment its own are added.
        groups_per_step: Prompts of one optimizer step; the last of an epoch has what is left.
        rollouts_per_group: Responses to each prompt; one needs a critic (`model.critic`).
        max_lag: Most versions from writing a token to training it; 0 is on-policy.
        stragglers: What happens when a group has reached that bound and still runs: `wait` holds
            the trainer, `mask` masks the group's too old tokens out of the loss when it comes.
        max_prompt_tokens: Longest prompt; of an agent, which writes it, its first request.
        max_response_tokens: Longest response; with the prompt it is the generators' context length.
        temperature: Sampling temperature, also of the policy's logits; at least 0.01.
        micro_batch_tokens: Most tokens (padding included) in one forward pass.
        share_prefixes: Whether the responses to a prompt read it once in training, where the model
            can (`lrl.training.prefix_tree`); no result depends on it.
        advantages: The baseline; default `lrl.advantages.GroupMean`.
        max_skipped_per_step: Most groups with advantages of 0, per policy version, that are
            replaced by fresh prompts, if need be of the next epoch; 0 trains them all.
        mask_truncated: Whether a cut response counts in the baseline alone, not in the loss.
        replay: Trains older groups again, besides a step's own; null never does.
        dispatch: Chooses a generator for each prompt; default `LeastLoaded`.
        migration: Moves half-written responses to idle generators; null never does.
        length_predictor: Learns which prompts have long responses; null does so only if `dispatch`
            or `migration` needs it.
        reward_workers: Processes that score responses on the trainer's machine.
        worker_launcher: Starts workers on other machines (`lrl.members.launchers`), which score and
            play episodes; null for none.
        reward_timeout_s: Most seconds of all rewards for one response; null for 10, or as many as
            their own limits need.
        reward_memory_gib: GiB that scoring may allocate in one worker; null for no limit.
        worker_start_timeout_s: Most seconds for the start of a worker, which imports your script
            and modules.
        max_reward_failures: Largest share of the last few hundred responses that may get no reward,
            in (0, 1]; above it the run ends with an error. 1 never ends it.
        skip_special_tokens: Whether rewards and logs see no special tokens; false keeps those that
            end no response, such as `<think>`.
        prepend_opened_tag: Whether that text begins with the tag that the prompt has opened at its
            end, such as the `<think>` of a chat template.
        rollout_timeout_s: Most seconds for the responses to one prompt, or for a turn.
        environment: Answers the policy's turns (`lrl.environments.Turns`); null for single turns.
        max_turns: Turns after which an episode is cut.
        max_turn_tokens: Longest turn; null for `max_response_tokens`, which is of the whole
            episode, with what the environment writes.
        turn_timeout_s: Most seconds of the environment for one turn.
        episode_timeout_s: Most seconds of an episode after its first turn.
        environment_workers: Processes of the trainer's machine that play episodes, each many at
            once; 0 if others alone play.
        environment_memory_gib: GiB that one of them may allocate; null for no limit.
    """

    resumes_from: str | None = None
    """Checkpoint that the run resumes from; known at the preflight checks."""
    run: "Run | None" = None
    """The run that uses this data, or the last one; None before the first."""
    _restored: dict[str, Any] | None = None
    """A saved ledger, until a controller has it."""
    _attached_to: L.Trainer | None = None

    @answers_aliases
    def __init__(
        self,
        prompts: Prompts | str | list[dict[str, Any]],
        rewards: Sequence[OneReward] | OneReward | None = None,
        groups_per_step: int = 16,
        rollouts_per_group: int = 8,
        max_lag: int = 1,
        stragglers: Stragglers = "wait",
        max_prompt_tokens: int = 512,
        max_response_tokens: int = 512,
        temperature: float = 1.0,
        micro_batch_tokens: int = 8192,
        share_prefixes: bool = True,
        advantages: Advantages | None = None,
        max_skipped_per_step: int = 0,
        mask_truncated: bool = False,
        replay: Replay | None = None,
        dispatch: DispatchPolicy | None = None,
        migration: Migration | None = None,
        length_predictor: LengthPredictor | None = None,
        reward_workers: int = 1,
        worker_launcher: Launcher | None = None,
        reward_timeout_s: float | None = None,
        reward_memory_gib: float | None = 4.0,
        worker_start_timeout_s: float = START_TIMEOUT_S,
        max_reward_failures: float = 0.1,
        skip_special_tokens: bool = False,
        prepend_opened_tag: bool = True,
        rollout_timeout_s: float = 1800.0,
        environment: Environment | None = None,
        max_turns: int = 16,
        max_turn_tokens: int | None = None,
        turn_timeout_s: float = 60.0,
        episode_timeout_s: float = 1800.0,
        environment_workers: int = 1,
        environment_memory_gib: float | None = 4.0,
    ) -> None:
        super().__init__()
        self.prompts = Prompts.coerce(prompts)
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.stragglers = stragglers
        self.max_prompt_tokens = max_prompt_tokens
        self.micro_batch_tokens = micro_batch_tokens
        self.share_prefixes = share_prefixes
        self.advantages = advantages or GroupMean()
        self.max_skipped_per_step = max_skipped_per_step
        self.mask_truncated = mask_truncated
        self.replay = replay
        self.migration = migration
        self.dispatch = dispatch or LeastLoaded()
        self.length_predictor = length_predictor
        self.rollout_timeout_s = rollout_timeout_s
        self.sampling = Sampling(
            n=rollouts_per_group, max_tokens=max_response_tokens, temperature=temperature
        )
        self._check_each(environment)
        self._check_together()
        if length_predictor is None and (migration or self.dispatch.needs_lengths):
            self.length_predictor = LengthPredictor()
        self.dispatch.lengths = self.length_predictor
        self.reward_pool = RewardPool(
            _with_turn_rewards(as_list(rewards), environment),
            reward_workers,
            timeout_s=reward_timeout_s,
            memory_gib=reward_memory_gib,
            max_failures=max_reward_failures,
            start_timeout_s=worker_start_timeout_s,
        )
        self.worker_launcher = worker_launcher
        self.skip_special_tokens = skip_special_tokens
        self.prepend_opened_tag = prepend_opened_tag
        self._reward_settings = settings_of(self.reward_pool.rewards) | {
            "data.skip_special_tokens": str(skip_special_tokens),
            "data.prepend_opened_tag": str(prepend_opened_tag),
        }
        self.environment = _environment_of_run(
            environment,
            {
                "max_turns": max_turns,
                "max_turn_tokens": max_turn_tokens,
                "turn_timeout_s": turn_timeout_s,
                "episode_timeout_s": episode_timeout_s,
                "environment_workers": environment_workers,
                "environment_memory_gib": environment_memory_gib,
            },
            worker_launcher,
            max_tokens=max_response_tokens,
            max_prompt_tokens=max_prompt_tokens,
            start_timeout_s=worker_start_timeout_s,
        )
        self._environment_settings = self.environment.made_with if self.environment else {}
        if self.replay is not None:
            self.replay.prompts = self.prompts
        self.learners = Learners(self.advantages, self.replay, self.length_predictor)

    # ---- checks

    def _check_each(self, environment: Environment | None) -> None:
        instances(
            "data",
            advantages=(Advantages, self.advantages),
            replay=(Replay, self.replay),
            dispatch=(DispatchPolicy, self.dispatch),
            migration=(Migration, self.migration),
            length_predictor=(LengthPredictor, self.length_predictor),
            environment=(Environment, environment),
        )
        one_of("data", stragglers=(get_args(Stragglers), self.stragglers))
        at_least(0, "data", max_lag=self.max_lag, max_skipped_per_step=self.max_skipped_per_step)
        at_least(
            1,
            "data",
            groups_per_step=self.groups_per_step,
            micro_batch_tokens=self.micro_batch_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            max_response_tokens=self.sampling.max_tokens,
        )
        above(0, "data", rollout_timeout_s=self.rollout_timeout_s)
        temperature = self.sampling.temperature
        if not LEAST_TEMPERATURE <= temperature < float("inf"):
            raise ConfigError(
                f"data.temperature is {temperature}: it must be at least {LEAST_TEMPERATURE}, and "
                f"1.0 is usual. vLLM samples at {LEAST_TEMPERATURE} instead of a lower one, and "
                "greedily at 0, without a log-prob to learn from."
            )

    def _check_together(self) -> None:
        needs = self.advantages.min_rollouts
        if self.sampling.n < needs:
            raise ConfigError(
                f"data.rollouts_per_group is {self.sampling.n}; data.advantages "
                f"{type(self.advantages).__name__} needs at least {needs}. Raise it, or take "
                "lrl.advantages.ReinforcePlusPlus, or GAE with model.critic: they need one."
            )
        if self.max_skipped_per_step and not self.advantages.of_group_alone:
            raise ConfigError(
                f"data.max_skipped_per_step is {self.max_skipped_per_step}, and with data.advantages "
                f"{type(self.advantages).__name__} responses of equal rewards have a gradient: "
                "leave it out."
            )

    def check_prompts(self, ledger: dict[str, Any]) -> None:
        """Raises ValueError if the prompts differ from a saved ledger's, in themselves or in their
        order."""
        if ledger.get("prompts", self.prompts.fingerprint) != self.prompts.fingerprint:
            raise ValueError(
                "The checkpoint was made with other prompts or another order of them: data.prompts "
                "has changed (rows, seed, template or tokenizer). Resume with the data set it was "
                "made with."
            )

    # ---- prompts and responses

    def tokenise(self, prompts: Prompts, tokenizer: Any) -> None:
        environment = None if self.environment is None else self.environment.environment
        try:
            prompts.load(tokenizer, self.max_prompt_tokens, environment)
        except ConfigError as error:
            setting = "data.prompts" if prompts is self.prompts else "Evaluation.prompts"
            raise ConfigError(f"{setting}: {error}") from error

    def probe_tokens(self, count: int) -> list[int]:
        """Returns `count` tokens of real prompts for a proof, always the same; they repeat if there
        are fewer."""
        run = self._run
        prompts = self.prompts if run.trains else run.evaluations[0].prompts
        tokens = [token for prompt in islice(prompts, count) for token in prompt.token_ids]
        while 0 < len(tokens) < count:
            tokens *= 2
        return tokens[:count]

    @property
    def requests(self) -> Sampling:
        """Sampling settings of the requests for this policy: with its stop tokens."""
        return replace(self.sampling, stop_tokens=tuple(sorted(self._policy.stop_tokens)))

    @property
    def max_model_tokens(self) -> int:
        return self.max_prompt_tokens + self.sampling.max_tokens

    @property
    def policy_text(self) -> PolicyText:
        return PolicyText(
            tokenizer=self._policy.tokenizer,
            ends=self._policy.stop_tokens,
            skip_special_tokens=self.skip_special_tokens,
            prepend_opened_tag=self.prepend_opened_tag,
        )

    # ---- the parts of a run

    def writer(self, pool: GeneratorPool, *, spare: bool = False) -> Write:
        write = partial(pool.generate, spare=spare)
        if self.environment is None:
            return write
        from lrl.rollouts.episodes.episode import Episodes  # here: most runs have none

        return Episodes(self.environment, write, self.policy_text, self._tool_calls(pool)).generate

    def _tool_calls(self, pool: GeneratorPool) -> "ToolCallParser | None":
        if self._run.strategy.server_settings.tool_parser is None:
            return None
        from lrl.generators.tool_calls import ToolCallParser  # here: most runs have none

        return ToolCallParser(pool, self._policy.stop_tokens)

    def scorer(self, rewards: RewardPool) -> Score:
        environment = None if self.environment is None else self.environment.environment
        return partial(
            score,
            decode=self.policy_text.decode,
            rewards=rewards.score,
            judges_last_turn=environment is not None and environment.judges_last_turn,
        )

    @property
    def pacing(self) -> Pacing:
        max_steps = self._run.trainer.max_steps
        return Pacing(
            prompts_per_epoch=max(1, len(self.prompts)),
            groups_per_step=self.groups_per_step,
            max_lag=self.max_lag,
            last_step=max_steps if max_steps > 0 else None,
            wait_for_stragglers=self.stragglers == "wait",
        )

    def make_calls(self, run: "Run") -> ControllerCalls:
        pool, policy = run.fleet.rollouts, run.policy
        environment_s = teacher_s = 0.0
        if self.environment is not None:
            environment_s = self.environment.timeout_s
            if parser := self._tool_calls(pool):
                trial = self.environment.try_parser(parser, self.policy_text)
                run.fleet.call(trial, "parsing a call of a tool")
        if policy.asked_teacher is not None:
            teacher_s = policy.asked_teacher.endpoint.deadline_s
        controller = Controller(
            self.prompts,
            self.writer(pool),
            self.scorer(self.reward_pool),
            ledger=Ledger(self.pacing),
            sampling=self.requests,
            deadline_s=self.rollout_timeout_s,
            max_skipped=self.max_skipped_per_step,
            advantages=self.advantages,
            lengths=self.length_predictor,
            environment=self._environment_settings,
            teacher=policy.asked_teacher,
        )
        if self._restored is not None:
            self.check_prompts(self._restored)
            other_rewards = changes(self._restored.get("rewards"), self._reward_settings)
            controller.load_state_dict(self._restored, other_rewards)
            self._restored = None
            if controller.resumed:
                rank_zero_info(str(controller.resumed))
        return ControllerCalls(
            controller,
            run.loop,
            group_deadline_s=2 * self.rollout_timeout_s + environment_s + teacher_s,
            poll=run.poll,
        )

    def make_packer(self, step: int, policy: "PolicyModel") -> Packer:
        shares = self.share_prefixes and policy.responses_share.prefixes
        return Packer(
            self.micro_batch_tokens,
            self.advantages,
            self.sampling.temperature,
            oldest_version=step - self.max_lag if self.stragglers == "mask" else None,
            whole_groups=policy.objective.whole_groups,
            mask_truncated=self.mask_truncated,
            data_parallel_size=policy.data_parallel_size,
            share_rows=policy.responses_share.rows,
            blanks=policy.sharding is not None,
            attention_tokens=policy.attention_tokens if shares else 0,
            masks=policy.responses_share.masks,
        )

    # ---- Lightning's hooks

    def setup(self, stage: str) -> None:
        run = self._run
        if run.trains and run.leads:
            self._restored = None  # of an earlier fit; a checkpoint is loaded after this
            self.learners.begin_anew()
        run.prepare()

    def train_dataloader(self) -> "StepLoader":
        """Returns the lazy loader of optimizer steps; rank 0 broadcasts its length."""
        # Without a length Lightning would fetch a step ahead of training it, which deadlocks an
        # on-policy run and skips a step at a resume.
        run = self._run
        steps = run.strategy.broadcast(self.pacing.steps_per_epoch if run.leads else 0)
        return StepLoader(steps, run.next_step)

    def val_dataloader(self) -> Sequence[Any]:
        if self._run.trains:
            return []
        # Not a list: Lightning takes all items of nested lists for loaders.
        return UserList(self._run.evaluations)

    def teardown(self, stage: str) -> None:
        """Keeps the ledger, which a checkpoint may be made of after the run."""
        self._restored = self._ledger_state()

    @property
    def trainer(self) -> L.Trainer | None:
        return self._attached_to

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        self._attached_to = trainer
        # Lightning sets the trainer just before it looks for a checkpoint.
        if isinstance(trainer, L.Trainer):
            find_by_lrl(trainer, partial(setattr, self, "resumes_from"))

    @property
    def _run(self) -> "Run":
        if self.run is None:
            raise RuntimeError(
                "There is no run: `trainer.fit(policy, data)` makes one, in "
                "`PolicyModule.configure_callbacks`."
            )
        return self.run

    @property
    def _policy(self) -> "PolicyModel":
        return self._run.policy

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the ledger after the steps done, and the learners, in plain types and tensors;
        rank 0's is saved."""
        if self.run is not None:
            self.run.settle()
        return self.learners.state_dict(self._made_with) | {"ledger": self._ledger_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict["ledger"]
        if self.run is None or self.run.trains:
            self.learners.load_state_dict(state_dict, self._made_with)

    def _ledger_state(self) -> dict[str, Any] | None:
        """Returns the controller's state, or the loaded state before there is a controller."""
        state = None if self.run is None else self.run.controller_state()
        if state is None:
            return self._restored
        return state | {"prompts": self.prompts.fingerprint, "rewards": self._reward_settings}

    @property
    def _made_with(self) -> dict[str, Settings]:
        reference = None if self.run is None else self.run.policy.reference
        return self.learners.made_with(
            sampling=self.sampling,
            rewards=self._reward_settings,
            environment=self._environment_settings,
            kl_in_the_reward=() if reference is None else reference.settings_of_the_reward,
        )


class StepLoader:
    """The loader that Lightning iterates: `steps` an epoch, each made when it is asked for."""

    def __init__(self, steps: int, next_step: Callable[[], Step]) -> None:
        self._steps = steps
        self._next_step = next_step

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Step]:
        while True:
            yield self._next_step()


def _with_turn_rewards(rewards: list[Reward], environment: Environment | None) -> list[Reward]:
    has_rewards = environment is not None and environment.gives_rewards
    if has_rewards and not any(isinstance(reward, TurnRewards) for reward in rewards):
        return [*rewards, TurnRewards()]
    return rewards


def _environment_of_run(
    environment: Environment | None,
    settings: dict[str, Any],
    launcher: Launcher | None,
    **limits: Any,
) -> "EnvironmentOfRun | None":
    defaults = inspect.signature(RolloutDataModule).parameters
    changed = [name for name, value in settings.items() if value != defaults[name].default]
    if environment is None:
        if changed:
            raise ConfigError(
                f"data.{changed[0]} is set, and there is no data.environment: a response is a "
                "single turn. Name one, or leave the setting out."
            )
        return None
    # Here: most runs have none.
    from lrl.rollouts.episodes.environment_of_run import EnvironmentOfRun

    found = EnvironmentOfRun(environment, **settings, **limits)
    of_processes = [name for name in changed if name.startswith("environment_")]
    if found.external and of_processes:
        raise ConfigError(
            f"data.{of_processes[0]} is set, and agents play that lrl does not start (Agent.port): "
            "leave it out."
        )
    if settings["environment_workers"] == 0 and launcher is None:
        raise ConfigError(
            "data.environment_workers is 0, and there is no data.worker_launcher: nothing would play "
            "episodes. Raise it, or name a launcher (Given, if others start it)."
        )
    return found
