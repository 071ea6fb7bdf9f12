"""Checks of settings that must fit together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer

from lrl.advantages import Advantages, GroupMean
from lrl.generators.settings import QUANTIZATIONS, SPARE_SLOTS, dashed, speculates
from lrl.members.run_file import fault_without_token
from lrl.objectives import Tokens
from lrl.rewards.pool import is_in_main
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.system.config_errors import any_noted, fault, noting
from lrl.system.cpu_formats import computes_in
from lrl.training.reference import Reference

if TYPE_CHECKING:
    from lrl.callbacks.evaluation import Evaluation
    from lrl.datamodule import RolloutDataModule
    from lrl.members.launchers import Launcher
    from lrl.preflight.policy import Policy
    from lrl.training.critic import Critic

log = logging.getLogger(__name__)

CPU_QUANTIZATION = "fp8_per_channel"
"""The quantization that vLLM's CPU build computes with (tried with 0.32)."""


def check_settings(trainer: L.Trainer, policy: Policy, data: RolloutDataModule) -> None:
    """Checks the settings of trainer, policy and data together."""
    strategy = trainer.strategy
    assert isinstance(strategy, GeneratorDevices), "the caller has checked it"
    with noting():
        strategy.plan()
    if strategy.generator_launcher is not None and not any_noted():  # it may take seconds
        with noting():
            strategy.generator_launcher.prepare(
                strategy.gpus_of_each, strategy.server_settings.host
            )
    strategy.check()
    check_quantization(strategy, policy)
    check_speculation(strategy)
    check_number_formats(trainer, policy)
    check_context(strategy, data)
    check_tool_parser(strategy, data)
    check_placement(strategy, data)
    check_ranks(trainer)
    check_environment_launcher(strategy, data)
    if trainer.state.fn != "fit":
        return
    check_objective(policy, data)
    check_critic(trainer, policy, data)
    check_sync(trainer, data)
    check_reward_launcher(strategy, data)
    if policy.lora is not None and strategy.tensor_parallel_size > 1:
        fault(
            f"strategy.tensor_parallel_size is {strategy.tensor_parallel_size} and model.lora is "
            "set: the plans that divide a layer do not know its adapters. Set it to 1: the layers "
            "are then sharded alone."
        )
    if policy.critic is not None and policy.critic.model is not None:
        check_critic_model(strategy)
    for flag in ("max_steps", "max_epochs", "limit_train_batches"):
        if getattr(trainer, flag) == 0:
            fault(
                f"trainer.{flag} is 0: nothing would be trained. Leave it out, or use `lrl "
                "validate`."
            )
    warn_without_end(trainer)
    if policy.lr == 0:
        log.warning("model.lr is 0: the policy stays as it is.")
    if 0 < trainer.max_steps < policy.warmup_steps:
        log.warning(
            "model.warmup_steps is %d and trainer.max_steps %d: the learning rate never reaches "
            "model.lr.",
            *(policy.warmup_steps, trainer.max_steps),
        )


def warn_without_end(trainer: L.Trainer) -> None:
    """Warns of a run that nothing ends."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    timed = any(isinstance(callback, Timer) for callback in callbacks)
    if trainer.max_steps == -1 and trainer.max_epochs == -1 and not timed:
        log.warning(
            "Nothing ends this run: trainer.max_steps and trainer.max_epochs are -1. Set "
            "trainer.max_steps, or end it with Ctrl-C, which saves it."
        )


def check_reward_launcher(strategy: GeneratorDevices, data: RolloutDataModule) -> None:
    """Checks that scorers can be started, can join, and can import the rewards."""
    in_main = [repr(reward.name) for reward in data.reward_pool.rewards if is_in_main(reward)]
    check_worker_launcher(
        strategy,
        data.reward_launcher,
        setting="data.reward_launcher",
        members="scorers",
        in_main=f"data.rewards has {in_main[0]}" if in_main else "",
    )


def check_environment_launcher(strategy: GeneratorDevices, data: RolloutDataModule) -> None:
    """Checks that environments can be started, can join, and can import the run's."""
    if data.environment is None:
        return
    name = type(data.environment.environment).__name__
    check_worker_launcher(
        strategy,
        data.environment.launcher,
        setting="data.environment_launcher",
        members="environments",
        in_main=f"data.environment is {name}" if data.environment.pool.is_in_main else "",
    )


def check_worker_launcher(
    strategy: GeneratorDevices,
    launcher: Launcher | None,
    *,
    setting: str,
    members: str,
    in_main: str,
) -> None:
    """Checks that members with workers can be started, can join, and can import what they need.

    Args:
        strategy: Has the run's address and token.
        launcher: Starts them; None for a run in which nothing does.
        setting: The setting that it is the value of.
        members: What they are.
        in_main: Setting and value that are defined in the script that runs; empty if none is.
    """
    if launcher is None:
        return
    kind = type(launcher).__name__
    if in_main:
        fault(
            f"{setting} is {kind}, and {in_main}, which is defined in the script that runs: other "
            "machines cannot import it from there. Define it in a module that is on each of them."
        )
    if not launcher.starts and not strategy.has_given_token:
        fault_without_token(f"{setting} is {kind}", members)
    if not any_noted():
        with noting():
            launcher.prepare(0, strategy.server_settings.host, setting)


def check_quantization(strategy: GeneratorDevices, policy: Policy) -> None:
    """Checks that vLLM has kernels for matrices in that format."""
    server = strategy.server_settings
    setting = f"strategy.server.quantization is {server.quantization}"
    if server.quantization not in QUANTIZATIONS:  # its class has noted an unknown one
        return
    if strategy.root_device.type != "cuda" and server.quantization != CPU_QUANTIZATION:
        fault(
            f"{setting}, for which vLLM has no kernels on a CPU: choose {CPU_QUANTIZATION}, or null."
        )
    if (policy.dtype_name if server.dtype == "auto" else server.dtype) == "float32":
        fault(
            f"{setting}, and strategy.server.dtype float32: vLLM computes with it in 16 bits. Set "
            "that to bfloat16."
        )


def check_speculation(strategy: GeneratorDevices) -> None:
    """Checks that the generators' build of vLLM decodes speculatively without false log-probs."""
    if strategy.root_device.type != "cuda" and speculates(strategy.server_settings.extra_args):
        fault(
            "strategy.server.extra_args turns speculative decoding on, and the policy is trained "
            "on a CPU: vLLM's CPU build then accepts tokens at the wrong rate and returns false "
            "log-probs (seen with 0.32 and 0.33). Leave speculative-config out."
        )


def check_tool_parser(strategy: GeneratorDevices, data: RolloutDataModule) -> None:
    """Checks that the generators parse calls of tools if the environment has tools, and know the
    parser."""
    server = strategy.server_settings
    parser, setting = server.tool_parser, "strategy.server.tool_parser"
    environment = None if data.environment is None else data.environment.environment
    has_tools = environment is not None and environment.tools
    may_have_tools = environment is not None and environment.writes_prompt
    if parser is None:
        if has_tools:
            fault(
                f"data.environment has tools, and {setting} is null: name vLLM's parser for the "
                "policy's family, such as hermes (Qwen2.5, Qwen3), llama3_json, mistral. vLLM's page "
                "on tool calling has them all."
            )
        return
    if not has_tools and not may_have_tools:
        fault(f"{setting} is {parser!r}, and data.environment has no tools: leave it out.")
    from lrl.generators.tool_calls import known_parsers  # here: most runs have none

    known = known_parsers()
    plugin = "tool-parser-plugin" in map(dashed, server.extra_args)
    if known and parser not in known and not plugin:
        fault(f"{setting} is {parser!r}, which vLLM does not have. Choose from {', '.join(known)}.")


def check_number_formats(trainer: L.Trainer, policy: Policy) -> None:
    """Warns of a number format in which the CPU of a run without GPUs is slow."""
    strategy = trainer.strategy
    assert isinstance(strategy, GeneratorDevices), "the caller has checked it"
    if strategy.root_device.type != "cpu":
        return
    formats = {"model.dtype": policy.dtype_name}
    if trainer.precision == "bf16-mixed":
        formats["trainer.precision"] = "bfloat16"
    server = strategy.server_settings
    # A launcher's generators compute elsewhere, and a quantised one has to be in 16 bits.
    if (
        server.dtype != "auto"
        and strategy.generator_launcher is None
        and server.quantization is None
    ):
        formats["strategy.server.dtype"] = server.dtype
    for setting, dtype in formats.items():
        if not computes_in(dtype):
            log.warning(
                "%s computes in %s, and this CPU has no instructions for it: a product of matrices "
                "can take thirty times as long as in float32. Set it to %s.",
                *(setting, dtype, "32-true" if setting == "trainer.precision" else "float32"),
            )


def check_ranks(trainer: L.Trainer) -> None:
    """Checks that there is one rank without training, which is the only work for more."""
    if trainer.world_size > 1 and trainer.state.fn != "fit":
        fault(
            f"trainer.devices less strategy.generator_devices leaves {trainer.world_size} trainer "
            "ranks, and without training there is work for one. Lower trainer.devices by "
            f"{trainer.world_size - 1}."
        )


def check_placement(strategy: GeneratorDevices, data: RolloutDataModule) -> None:
    """Checks that a shared placement has no lag and no devices that only generate."""
    if strategy.placement == "split":
        return
    if data.max_lag:
        fault(
            f"strategy.placement is shared and data.max_lag is {data.max_lag}: generators that are "
            "paused while the trainer trains can write nothing ahead. Set data.max_lag to 0, or "
            "strategy.placement to split."
        )
    if strategy.root_device.type == "cuda" and strategy.num_generator_devices:
        fault(
            "strategy.placement is shared and strategy.generator_devices is "
            f"{strategy.num_generator_devices}: devices that only generate are not shared. Set "
            "strategy.generator_devices to 0, or strategy.placement to split."
        )


def check_objective(policy: Policy, data: RolloutDataModule) -> None:
    """Checks that the advantages are the ones that the objective and the critic need."""
    objective, advantages = policy.objective, data.advantages
    if advantages.needs_critic and policy.critic is None:
        fault(
            f"data.advantages {type(advantages).__name__} needs the values of a critic: set "
            f"model.critic to {_critic_for(advantages.needs_turn_critic)}."
        )
    if policy.critic is not None:
        check_values(policy.critic, advantages)
    if objective.needs_group_mean and not isinstance(advantages, GroupMean):
        fault(
            f"model.objective {type(objective).__name__} works on rewards less the group's mean, "
            f"and data.advantages is {type(advantages).__name__}: use lrl.GroupMean."
        )
    if objective.needs_group_mean and policy.reference and policy.reference.rewards_tokens:
        fault(
            f"model.objective {type(objective).__name__} works on the rewards of whole responses, "
            "and model.reference Teacher rewards each token: take another objective, such as AIPO."
        )
    check_skipping(policy, data)
    if objective.whole_responses and data.stragglers == "mask":
        fault(
            f"model.objective {type(objective).__name__} weighs whole responses, and "
            "data.stragglers mask leaves out their tokens that are too old: set data.stragglers to "
            "wait, or take an objective that weighs each token."
        )
    if objective.whole_responses and data.environment and data.environment.environment.branches:
        fault(
            f"model.objective {type(objective).__name__} weighs whole responses, and the branches "
            "of an agent's episode are trained one by one: set `branches` of data.environment to "
            "false, or take an objective that weighs each token."
        )


def check_values(critic: Critic, advantages: Advantages) -> None:
    """Checks that the advantages read the values of this kind of critic."""
    suits = f"lrl.advantages.{'ArCHer' if critic.of_turns else 'GAE'}"
    if not advantages.needs_critic:
        fault(
            f"model.critic is set, and data.advantages {type(advantages).__name__} does not use its "
            f"values: set data.advantages to {suits}, or leave model.critic out."
        )
    elif advantages.needs_turn_critic != critic.of_turns:
        fault(
            f"model.critic is {type(critic).__name__}, and data.advantages "
            f"{type(advantages).__name__} reads the values of another kind of critic: set "
            f"data.advantages to {suits}, or model.critic to "
            f"{_critic_for(advantages.needs_turn_critic)}."
        )


def _critic_for(turns: bool) -> str:
    return "lrl.TurnCritic" if turns else "lrl.Critic"


def check_skipping(policy: Policy, data: RolloutDataModule) -> None:
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
        reference_logprobs=numbers.flip(0),
    )
    tokens = tokens._replace(advantages=reference.advantages(tokens))
    losses = policy.objective.token_losses(tokens) + reference.token_losses(tokens)
    (gradient,) = torch.autograd.grad(losses.sum(), tokens.logprobs)
    if gradient.any() or (reference.penalty_in == "reward" and reference.coefficient):
        beside = f"model.objective {type(policy.objective).__name__}"
        if policy.reference is not None:
            beside += f" and model.reference {type(reference).__name__}"
        fault(
            f"data.max_skipped_per_step is {data.max_skipped_per_step}, and with {beside} "
            "responses of equal rewards have a gradient: leave it out."
        )


def check_critic_model(strategy: GeneratorDevices) -> None:
    """Checks that the strategy can train a critic's model of its own."""
    if strategy.tensor_parallel_size > 1:
        fault(
            f"strategy.tensor_parallel_size is {strategy.tensor_parallel_size} and "
            "model.critic.model is set: a critic's layers are not divided. Set it to 1: the layers "
            "are then sharded alone. Or leave model.critic.model out."
        )


def check_critic(trainer: L.Trainer, policy: Policy, data: RolloutDataModule) -> None:
    """Checks that the policy learns at all, and that the critic's settings have an effect."""
    if (critic := policy.critic) is None:
        return
    if critic.clip is not None and data.replay is None:
        fault(
            f"model.critic.clip is {critic.clip}, and data.replay is not set: a step trains each "
            "value once, from where it is, so none would be clipped. Leave it out."
        )
    alone = critic.value_only_steps
    if 0 < trainer.max_steps <= alone:
        fault(
            f"model.critic.value_only_steps is {alone} and trainer.max_steps {trainer.max_steps}: "
            "the policy would learn nothing. Lower the one or raise the other."
        )


def check_sync(trainer: L.Trainer, data: RolloutDataModule) -> None:
    """Checks that there is one `WeightSync`, and that it syncs often enough for the next group to
    start."""
    from lrl.callbacks.base import find_all
    from lrl.callbacks.weight_sync import WeightSync

    syncs = find_all(trainer, WeightSync)
    if len(syncs) > 1:
        fault(
            f"trainer.callbacks has {len(syncs)} lrl.callbacks.WeightSync: keep one, or every "
            "version moves twice."
        )
    for sync in syncs:
        if 0 <= data.max_lag < sync.every_n_steps - 1:
            fault(
                f"WeightSync.every_n_steps is {sync.every_n_steps} and data.max_lag is "
                f"{data.max_lag}: step {data.max_lag + 1} would wait for ever. Set data.max_lag to "
                f"at least {sync.every_n_steps - 1}."
            )


def check_context(strategy: GeneratorDevices, data: RolloutDataModule) -> None:
    """Checks a generator's context and slots against prompts, responses and groups."""
    server, needed = strategy.server_settings, data.max_model_tokens
    if server.max_model_len is not None and server.max_model_len < needed:
        fault(
            f"strategy.server.max_model_len is {server.max_model_len}, but data.max_prompt_tokens "
            f"and data.max_response_tokens add up to {needed}. Leave it out, or give at least "
            f"{needed}."
        )
    if data.sampling.n > server.max_num_seqs:
        log.warning(
            "data.rollouts_per_group is %d and strategy.server.max_num_seqs %d: a group fills a "
            "generator and waits in it. Raise max_num_seqs.",
            *(data.sampling.n, server.max_num_seqs),
        )
    if data.micro_batch_tokens < needed:
        log.warning(
            "data.micro_batch_tokens is %d and a response with its prompt may have %d tokens: a "
            "longer one makes a micro-batch alone, larger than that.",
            *(data.micro_batch_tokens, needed),
        )


def check_evaluations(trainer: L.Trainer, evaluations: Sequence[Evaluation]) -> None:
    """Checks that evaluations have different names, and fit the spare slots."""
    for name, times in Counter(evaluation.prompts.name for evaluation in evaluations).items():
        if times > 1:
            fault(
                f"trainer.callbacks has {times} lrl.callbacks.Evaluation of prompts named "
                f"{name!r}, which would overwrite one another's results. Set the `name` of their "
                "prompts."
            )
    concurrency = sum(evaluation.concurrency for evaluation in evaluations)
    if concurrency > SPARE_SLOTS and not getattr(trainer.strategy, "num_evaluation_generators", 0):
        log.warning(
            "Evaluation.concurrency adds up to %d; besides the rollouts a generator has %d slots.",
            concurrency,
            SPARE_SLOTS,
        )
