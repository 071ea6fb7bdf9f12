"""Settings of trainer, policy and data that must fit together; Lightning's flags and callbacks that
would be ignored or wrong (docs/lightning.md has the table)."""

from __future__ import annotations

import os
import pickle
import signal
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lrl.advantages import GroupMean
from lrl.callbacks.base import find_all
from lrl.callbacks.evaluation import Evaluation
from lrl.callbacks.weight_sync import WeightSync
from lrl.errors import ConfigError
from lrl.generators.settings import speculates
from lrl.members.registry import fault_without_token
from lrl.objectives import Tokens
from lrl.preflight.model import check_policy
from lrl.preflight.resources import (
    check_checkpoint,
    check_data,
    check_prompts_per_step,
    check_resources,
)
from lrl.strategies.generator_devices import AsyncSingleDevice, GeneratorDevices
from lrl.training.beside.reference import Reference
from lrl.training.optimizers import check_end
from lrl.workers.worker import names_main

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.policy_model import PolicyModel
    from lrl.run import Run

STEP_SIZE = "data.micro_batch_tokens and data.groups_per_step set the sizes of a step"
NO_LOSS = "the loss of a step says nothing about how good the policy is"
CALLBACKS: dict[type[L.Callback], str] = {
    callbacks.GradientAccumulationScheduler: STEP_SIZE,
    callbacks.BatchSizeFinder: f"{NO_LOSS}. Set data.micro_batch_tokens to what fits",
    callbacks.LearningRateFinder: f"{NO_LOSS}. Compare runs by reward or accuracy",
    callbacks.StochasticWeightAveraging: "the generators have the policy itself, not an average",
    callbacks.WeightAveraging: "the generators have the policy itself, not an average",
    callbacks.ModelPruning: "it renames weights, and generators know them by their names",
    callbacks.BackboneFinetuning: "freeze weights in a PolicyModule of your own",
    callbacks.OnExceptionCheckpoint: "every run saves by itself when an error or a signal ends it",
    callbacks.SpikeDetection: "it reads a loss that no step returns. See lrl.callbacks.Health",
}
"""Lightning's callbacks that cannot work, and the reason."""
PRECISIONS = ("32-true", "bf16-mixed")
"""The precisions that leave torch's default dtype as it is."""


def refuse_without_generators(strategy: object) -> None:
    if not isinstance(strategy, GeneratorDevices):
        kind = strategy if isinstance(strategy, type) else type(strategy)
        name = strategy if isinstance(strategy, str) else kind.__name__
        raise ConfigError(
            f"trainer.strategy is {name}, which has no generators: use an object of "
            "lrl.AsyncSingleDevice, lrl.AsyncDDP or lrl.AsyncFSDP."
        )


def check_strategy(trainer: L.Trainer) -> None:
    """Checks, on every rank, that the strategy of Lightning's own Trainer has generators."""
    if isinstance(trainer.strategy, GeneratorDevices):
        return
    # Lightning starts the other ranks of its own strategies before any hook of ours; they would
    # wait for rank 0 long after its error.
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        launcher.kill(signal.SIGKILL)
        launcher.procs.clear()  # in place: Lightning's observer reads it, and would kill this process after them
        os.environ.pop(
            "LOCAL_RANK", None
        )  # by it the next run would be a rank that waits for others
    refuse_without_generators(trainer.strategy)


def check_trainer(trainer: Any, policy: PolicyModel) -> None:
    """Checks the verb, the flags and the callbacks of a trainer: what Lightning would take."""
    if trainer.state.fn in ("test", "predict"):
        raise ConfigError(
            f"trainer.{trainer.state.fn.value}: an lrl policy is trained and validated. Use "
            "trainer.validate with lrl.callbacks.Evaluation, or `lrl chat`."
        )
    if not trainer.is_global_zero:
        return
    for flag, value, allowed, remedy in _flags(trainer):
        if value not in allowed:
            raise ConfigError(f"trainer.{flag}={value!r}: {remedy}.")
    if (default := torch.get_default_dtype()) != torch.float32:
        raise ConfigError(
            f"torch's default dtype is {default}, in which a step would compute log-probs and "
            "lengths. Leave torch.set_default_dtype out, and set model.dtype."
        )
    for callback in trainer.callbacks:
        for kind, reason in CALLBACKS.items():
            if isinstance(callback, kind):
                name = type(callback).__name__
                raise ConfigError(f"trainer.callbacks has {name}: {reason}. Remove it.")
    if trainer.state.fn != "fit":
        if not find_all(trainer, Evaluation):
            raise ConfigError("trainer.validate runs lrl.callbacks.Evaluation, and there is none.")
        return
    if trainer.global_step and getattr(trainer.datamodule, "resumes_from", None) is None:
        raise ConfigError(
            f"This Trainer has fitted {trainer.global_step} steps before and would go on counting, "
            "with a new optimizer. Make a new Trainer, or continue with ckpt_path='last'."
        )
    check_end(policy.schedule, trainer.max_steps)


def _flags(trainer: Any) -> Iterator[tuple[str, Any, tuple[Any, ...], str]]:
    """Yields flags, each with its value, the allowed values, and the remedy."""
    clips = "set model.max_grad_norm, which clips the gradient of a whole step"
    yield "gradient_clip_val", trainer.gradient_clip_val, (None, 0), clips
    yield "accumulate_grad_batches", trainer.accumulate_grad_batches, (1,), STEP_SIZE
    yield "overfit_batches", trainer.overfit_batches, (0,), "set data.prompts.limit"
    if isinstance(trainer.strategy, AsyncSingleDevice):
        nodes = trainer._accelerator_connector._num_nodes_flag
        yield "num_nodes", nodes, (1,), "use lrl.AsyncDDP"
    if trainer.state.fn == "fit" and not trainer.fast_dev_run:  # which sets them itself
        evaluates = "evaluations run beside the training: set Evaluation.every_n_steps"
        seconds: float | None = trainer._val_check_time_interval
        interval = trainer.val_check_interval if seconds is None else f"{seconds:g} s"
        yield "val_check_interval", interval, (1.0,), evaluates
        yield "check_val_every_n_epoch", trainer.check_val_every_n_epoch, (1,), evaluates
    narrow = (
        "log-probs, lengths and gradients must be float32. Use bf16-mixed, or leave it out "
        "(32-true) and set model.dtype=bfloat16"
    )
    yield "precision", str(trainer.precision), PRECISIONS, narrow


def check_run(run: Run) -> None:
    """Checks a run, on rank 0; no weight is loaded, and a model that a Python function makes is made
    only if the rest is right. Raises ConfigError for the first fault."""
    check_settings(run)
    read = check_data(run)
    shape = check_policy(run, read)
    if run.trains:
        check_prompts_per_step(run.data, len(run.data.prompts))
    check_resources(run, shape)
    if run.data.resumes_from is not None:
        check_checkpoint(run, run.data.resumes_from, shape.trained)


def check_settings(run: Run) -> None:
    strategy, policy, data = run.strategy, run.policy, run.data
    strategy.check()
    check_servers(strategy, data)
    check_placement(strategy, data)
    check_worker_launcher(run)
    check_callbacks(run)
    if run.trains:
        check_objective(policy, data)
        check_skipping(policy, data)
        own_critic = policy.critic is not None and policy.critic.model is not None
        if strategy.tensor_parallel_size > 1 and (policy.lora is not None or own_critic):
            raise ConfigError(
                f"strategy.tensor_parallel_size is {strategy.tensor_parallel_size}: adapters "
                "(model.lora) and a critic's own model (model.critic.model) are not divided. Set it "
                "to 1."
            )
    elif run.trainer.world_size > 1:  # the others would wait for ever
        raise ConfigError(
            f"{run.trainer.world_size} trainer ranks have nothing to do without training: lower "
            f"trainer.devices by {run.trainer.world_size - 1}."
        )


def check_servers(strategy: GeneratorDevices, data: RolloutDataModule) -> None:
    server = strategy.server_settings
    if strategy.root_device.type != "cuda" and speculates(server.extra_args):
        raise ConfigError(
            "strategy.server.extra_args turns speculative decoding on: vLLM's CPU build then returns "
            "false log-probs (seen with 0.32 and 0.33). Leave speculative-config out."
        )
    environment = None if data.environment is None else data.environment.environment
    if server.tool_parser is None and environment is not None and environment.tools:
        raise ConfigError(
            "data.environment has tools, and strategy.server.tool_parser is null: name vLLM's parser "
            "for the policy's family, such as hermes (Qwen2.5, Qwen3), llama3_json, mistral, pythonic."
        )
    needed = data.max_model_tokens
    if server.max_model_len is not None and server.max_model_len < needed:
        raise ConfigError(
            f"strategy.server.max_model_len is {server.max_model_len}, and data.max_prompt_tokens "
            f"and data.max_response_tokens add up to {needed}. Leave it out, or raise it."
        )


def check_placement(strategy: GeneratorDevices, data: RolloutDataModule) -> None:
    if strategy.placement == "split":
        return
    if data.max_lag:
        raise ConfigError(
            f"strategy.placement is shared and data.max_lag is {data.max_lag}: paused generators "
            "write nothing ahead. Set data.max_lag to 0, or strategy.placement to split."
        )
    if strategy.root_device.type == "cuda" and strategy.num_generator_devices:
        raise ConfigError(
            "strategy.placement is shared and strategy.generator_devices is "
            f"{strategy.num_generator_devices}: set it to 0, or strategy.placement to split."
        )


def check_worker_launcher(run: Run) -> None:
    data, launcher = run.data, run.data.worker_launcher
    if launcher is None or not (run.trains or data.environment):
        return
    named = f"data.worker_launcher is {type(launcher).__name__}"
    script = [
        f"data.rewards has {one.name!r}"
        for one in (data.reward_pool.rewards if run.trains else ())
        if names_main(pickle.dumps(one))
    ]
    environment = data.environment
    if environment and environment.workers and names_main(environment.workers.spec.code):
        script.append(f"data.environment is {type(environment.environment).__name__}")
    if script:
        raise ConfigError(
            f"{named}, and {script[0]}, which is defined in the script that runs: other machines "
            "cannot import it. Define it in a module that is on each of them."
        )
    if not launcher.starts and not run.strategy.has_given_token:
        fault_without_token(named, "workers")


def check_callbacks(run: Run) -> None:
    trainer, max_lag = run.trainer, run.data.max_lag
    syncs = find_all(trainer, WeightSync)
    if len(syncs) > 1:
        raise ConfigError(f"trainer.callbacks has {len(syncs)} lrl.callbacks.WeightSync: keep one.")
    for sync in syncs if run.trains else ():
        if max_lag < sync.every_n_steps - 1:
            raise ConfigError(
                f"WeightSync.every_n_steps is {sync.every_n_steps} and data.max_lag is {max_lag}: "
                f"step {max_lag + 1} would wait for ever. Set data.max_lag to at least "
                f"{sync.every_n_steps - 1}."
            )
    names = Counter(evaluation.prompts.name for evaluation in find_all(trainer, Evaluation))
    for name, times in names.items():
        if times > 1:
            raise ConfigError(
                f"trainer.callbacks has {times} lrl.callbacks.Evaluation of prompts named {name!r}, "
                "which would overwrite one another's results. Set the `name` of their prompts."
            )


def check_objective(policy: PolicyModel, data: RolloutDataModule) -> None:
    objective, advantages, critic = policy.objective, data.advantages, policy.critic
    name, baseline = type(objective).__name__, type(advantages).__name__
    if critic is not None and not advantages.needs_critic:
        raise ConfigError(
            f"model.critic is set, and data.advantages {baseline} does not use its values: set "
            "data.advantages to lrl.advantages.GAE or ArCHer, or leave model.critic out."
        )
    if advantages.needs_critic and (
        critic is None or advantages.needs_turn_critic != critic.of_turns
    ):
        needed = "lrl.TurnCritic" if advantages.needs_turn_critic else "lrl.Critic"
        raise ConfigError(
            f"data.advantages {baseline} needs the values of a critic: set model.critic to {needed}."
        )
    if objective.needs_group_mean and not isinstance(advantages, GroupMean):
        raise ConfigError(
            f"model.objective {name} works on rewards less the group's mean, and data.advantages is "
            f"{baseline}: use lrl.GroupMean."
        )
    if objective.needs_group_mean and policy.reference and policy.reference.rewards_tokens:
        raise ConfigError(
            f"model.objective {name} works on the rewards of whole responses, and model.reference "
            "Teacher rewards each token: take another objective, such as AIPO."
        )
    if objective.whole_responses and data.stragglers == "mask":
        raise ConfigError(
            f"model.objective {name} weighs whole responses, and data.stragglers mask leaves out "
            "tokens that are too old: set data.stragglers to wait, or take another objective."
        )
    if objective.whole_responses and data.environment and data.environment.environment.branches:
        raise ConfigError(
            f"model.objective {name} weighs whole responses, and an agent's branches are trained one "
            "by one: set `branches` of data.environment to false, or take another objective."
        )


def check_skipping(policy: PolicyModel, data: RolloutDataModule) -> None:
    """Checks that responses with advantages of 0, which are skipped, have no gradient: tries it on
    eight tokens of two groups."""
    if not data.max_skipped_per_step:
        return
    reference = policy.reference or Reference()
    numbers, places = torch.linspace(-2.0, -1.0, 8), torch.arange(8)
    tokens = Tokens(
        logprobs=numbers.clone().requires_grad_(),
        behaviour_logprobs=numbers + 0.1,
        advantages=torch.zeros(8),
        lags=torch.zeros_like(places),
        responses=places // 2,
        groups=places // 4,
        num_responses=4,
        num_groups=2,
        reference_logprobs=numbers.flip(0),
    )
    tokens = tokens._replace(advantages=reference.advantages(tokens))
    losses = policy.objective.token_losses(tokens) + reference.token_losses(tokens)
    (gradient,) = torch.autograd.grad(losses.sum(), tokens.logprobs)
    if gradient.any() or (reference.penalty_in == "reward" and reference.coefficient):
        beside = f"model.objective {type(policy.objective).__name__}"
        if policy.reference is not None:
            beside += f" and model.reference {type(reference).__name__}"
        raise ConfigError(
            f"data.max_skipped_per_step is {data.max_skipped_per_step}, and with {beside} responses "
            "of equal rewards have a gradient: leave it out."
        )
