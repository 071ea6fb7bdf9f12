"""Settings and classes under the names that TRL, verl, transformers and vLLM give them.

The nearest spelling would mislead who comes from there. What lrl has not is said as well.
"""

NO_OTHER_SAMPLING = (
    "There is none: a response is drawn from the whole distribution at data.temperature, because "
    "log-probs of another one would not be the policy's."
)
ONE_PASS = (
    "There is none: a step is one update, on responses that are trained once. data.max_lag bounds "
    "their age, and data.replay trains groups again."
)
TURNS = "data.environment: a class of your own that derives from `Turns` of lrl.environments"
TOOLS = "data.environment: lrl.environments.Tools, with the functions in its `tools`"
VALUE_GRADIENT = (
    "model.critic.trunk_gradient, with --model.critic lrl.Critic; its own weights have a gradient "
    "of their own"
)
NO_ENTROPY = "There is none: add the term in `compute_loss` of a lrl.PolicyModule of your own."
PACKED = "There is none: responses are always packed, by length."
ALWAYS_VLLM = (
    "There is none: generators are always vLLM servers. trainer.strategy.generator_devices gives "
    "them devices, and trainer.strategy.placement shared lets both sides use the same ones in turn."
)
STEP_SIZE = "data.groups_per_step (prompts of a step) and data.micro_batch_tokens (memory)"
CLIP = (
    "epsilon_low and epsilon_high of model.objective (PPO and others; AIPO, the default, has rho)"
)
EVALUATION = (
    "a callback: --trainer.callbacks+ lrl.callbacks.Evaluation --trainer.callbacks.prompts DATA"
)
SCALED = "data.advantages: GRPO divides by the group's standard deviation, GroupMean does not"
OPTIMIZER = "`configure_optimizers` of a lrl.PolicyModule of your own; the default is AdamW"
REFRESH = "model.reference.refresh_every_n_steps, with --model.reference lrl.Reference"
CHECKPOINTS = "a callback: --trainer.callbacks+ ModelCheckpoint --trainer.callbacks."
REFERENCE = "model.reference.coefficient, with --model.reference lrl.Reference"
TEACHER = "model.reference.model, with --model.reference lrl.Teacher"
MAX_LAG = "data.max_lag, in versions of the policy"
TIS = "model.objective TIS, and its cap"

SETTINGS = {
    # sizes of a step
    "num_generations": "data.rollouts_per_group",
    "num_return_sequences": "data.rollouts_per_group",
    "group_size": "data.rollouts_per_group",
    "rollout_n": "data.rollouts_per_group",
    "n": "data.rollouts_per_group",
    "per_device_train_batch_size": STEP_SIZE,
    "batch_size": STEP_SIZE,
    "train_batch_size": "data.groups_per_step",
    "ppo_mini_batch_size": "data.groups_per_step",
    "generation_batch_size": "data.groups_per_step, in prompts",
    "gradient_accumulation_steps": "data.groups_per_step: a step gathers all its micro-batches",
    "micro_batch_size": "data.micro_batch_tokens",
    "ppo_micro_batch_size": "data.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "data.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "data.micro_batch_tokens",
    "log_prob_micro_batch_size_per_gpu": "data.micro_batch_tokens",
    "token_budget": "data.micro_batch_tokens",
    "num_iterations": ONE_PASS,
    "ppo_epochs": ONE_PASS,
    "steps_per_generation": ONE_PASS,
    "use_dynamic_bsz": PACKED,
    "use_remove_padding": PACKED,
    # lengths and sampling
    "max_completion_length": "data.max_response_tokens",
    "max_response_length": "data.max_response_tokens",
    "response_length": "data.max_response_tokens",
    "max_completion_tokens": "data.max_response_tokens",
    "max_new_tokens": "data.max_response_tokens",
    "max_tokens": "data.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_length": "data.max_prompt_tokens",
    "max_seq_length": "data.max_prompt_tokens and data.max_response_tokens",
    "vllm_max_model_length": "trainer.strategy.server.max_model_len",
    "top_p": NO_OTHER_SAMPLING,
    "top_k": NO_OTHER_SAMPLING,
    "min_p": NO_OTHER_SAMPLING,
    "repetition_penalty": NO_OTHER_SAMPLING,
    "generation_kwargs": NO_OTHER_SAMPLING,
    "do_sample": NO_OTHER_SAMPLING,
    # data
    "train_dataset": "data.prompts",
    "train_files": "data.prompts",
    "dataset": "data.prompts",
    "dataset_name": "data.prompts",
    "eval_dataset": EVALUATION,
    "val_files": EVALUATION,
    "eval_strategy": EVALUATION,
    "eval_steps": "every_n_steps of the callback lrl.callbacks.Evaluation",
    "test_freq": "every_n_steps of the callback lrl.callbacks.Evaluation",
    "num_generations_eval": "samples of the callback lrl.callbacks.Evaluation",
    "prompt_key": "data.prompts.prompt_column",
    "filter_overlong_prompts": "data.prompts.too_long skip",
    "truncation": "data.prompts.too_long: a prompt is refused or skipped, never cut",
    "chat_template": "data.prompts.chat: the template is that of the model's tokenizer",
    "apply_chat_template": "data.prompts.chat",
    "mask_truncated_completions": "data.mask_truncated",
    "tools": TOOLS,
    "multi_turn": TURNS,
    "environment_factory": TURNS,
    # rewards and advantages
    "reward_funcs": "data.rewards",
    "reward_func": "data.rewards",
    "reward_function": "data.rewards",
    "reward_fn": "data.rewards",
    "custom_reward_function": "data.rewards",
    "reward_weights": "the weight of each reward in data.rewards, as in `lrl.rewards.Function`",
    "scale_rewards": SCALED,
    "norm_adv_by_std_in_grpo": SCALED,
    "adv_estimator": "data.advantages",
    "gamma": "data.advantages.gamma (a discount by turn), with --data.advantages RewardToGo",
    "lam": "data.advantages.lam, with --data.advantages GAE",
    "gae_lambda": "data.advantages.lam, with --data.advantages GAE",
    "critic_warmup": "model.critic.value_only_steps, with --model.critic lrl.Critic",
    "vf_coef": VALUE_GRADIENT,
    "dynamic_sampling": "data.max_skipped_per_step",
    "filter_groups": "data.max_skipped_per_step",
    # objective
    "beta": REFERENCE,
    "kl_coef": REFERENCE,
    "kl_coeff": REFERENCE,
    "kl_loss_coef": REFERENCE,
    "init_kl_coef": REFERENCE,
    "use_kl_loss": REFERENCE,
    "use_kl_in_reward": "model.reference.penalty_in reward, with --model.reference lrl.Reference",
    "kl_loss_type": "model.reference.estimator, with --model.reference lrl.Reference",
    "kl_penalty": "model.reference.estimator, with --model.reference lrl.Reference",
    "ref_model": "model.reference.model, with --model.reference lrl.Reference",
    "teacher_model": TEACHER,
    "teacher_model_name_or_path": TEACHER,
    "sync_ref_model": REFRESH,
    "ref_model_sync_steps": REFRESH,
    "epsilon": CLIP,
    "epsilon_low": CLIP,
    "epsilon_high": CLIP,
    "cliprange": CLIP,
    "clip_ratio": CLIP,
    "clip_ratio_low": CLIP,
    "clip_ratio_high": CLIP,
    "importance_sampling_level": (
        "model.objective: GSPO has the ratio of a sequence, PPO of a token"
    ),
    "loss_type": "model.objective, and model.normalise_by (token, sequence, or a number of tokens)",
    "loss_agg_mode": "model.normalise_by (token, sequence, or a number of tokens)",
    "vllm_importance_sampling_correction": TIS,
    "vllm_importance_sampling_cap": TIS,
    "vllm_importance_sampling_clip_max": TIS,
    "tis_imp_ratio_cap": TIS,
    "entropy_coef": NO_ENTROPY,
    "entropy_coeff": NO_ENTROPY,
    "ent_coef": NO_ENTROPY,
    # optimizer and model
    "learning_rate": "model.lr",
    "lr_scheduler_type": "model.schedule",
    "warmup_style": "model.schedule",
    "warmup_ratio": "model.warmup_steps, a number of steps",
    "lr_warmup_steps_ratio": "model.warmup_steps, a number of steps",
    "lr_warmup_steps": "model.warmup_steps",
    "grad_clip": "model.max_grad_norm",
    "clip_grad": "model.max_grad_norm",
    "adam_beta1": "model.betas",
    "adam_beta2": "model.betas",
    "optim": OPTIMIZER,
    "optimizer": OPTIMIZER,
    "model_name_or_path": "model.model",
    "model_name": "model.model",
    "pretrained_model": "model.model",
    "model_path": "model.model",
    "attn_implementation": "model.attention",
    "torch_dtype": "model.dtype",
    "bf16": "trainer.precision bf16-mixed, or model.dtype bfloat16",
    "fp16": "trainer.precision bf16-mixed, or model.dtype bfloat16",
    "enable_gradient_checkpointing": "model.gradient_checkpointing",
    "peft_config": "model.lora",
    "use_peft": "model.lora",
    "r": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_target_modules": "model.lora.target_modules",
    # generators
    "use_vllm": ALWAYS_VLLM,
    "vllm_mode": ALWAYS_VLLM,
    "num_generators": "trainer.strategy.generator_devices",
    "vllm_gpu_memory_utilization": "trainer.strategy.server.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "trainer.strategy.server.tensor_parallel_size",
    "tensor_model_parallel_size": "trainer.strategy.server.tensor_parallel_size",
    "max_staleness": MAX_LAG,
    "staleness": MAX_LAG,
    "staleness_threshold": MAX_LAG,
    "max_off_policy_steps": MAX_LAG,
    "weight_sync_steps": "every_n_steps of the callback lrl.callbacks.WeightSync",
    "trigger_parameter_sync_step": "every_n_steps of the callback lrl.callbacks.WeightSync",
    # run
    "num_train_epochs": "trainer.max_epochs",
    "total_epochs": "trainer.max_epochs",
    "epochs": "trainer.max_epochs",
    "total_training_steps": "trainer.max_steps",
    "steps": "trainer.max_steps",
    "save_steps": f"{CHECKPOINTS}every_n_train_steps N",
    "save_freq": f"{CHECKPOINTS}every_n_train_steps N",
    "save_total_limit": f"{CHECKPOINTS}save_top_k N, with a monitor",
    "logging_steps": "trainer.log_every_n_steps",
    "log_completions": "samples of the callback lrl.callbacks.RolloutLog",
    "num_completions_to_print": "samples of the callback lrl.callbacks.RolloutLog",
    "report_to": "trainer.logger",
    "run_name": "trainer.logger.name",
    "experiment_name": "trainer.logger.name",
    "project_name": "trainer.logger.project, with --trainer.logger WandbLogger",
    "output_dir": "trainer.default_root_dir",
    "default_local_dir": "trainer.default_root_dir",
    "resume_from_checkpoint": "--ckpt_path, with a path or the word last",
    "resume_mode": "--ckpt_path, with a path or the word last",
    "resume_from_path": "--ckpt_path, with a path or the word last",
    "seed": "--seed_everything",
    "n_gpus_per_node": "trainer.devices",
    "num_gpus": "trainer.devices",
    "gpus": "trainer.devices",
    "num_devices": "trainer.devices",
    "nnodes": "trainer.num_nodes",
    "deepspeed": "trainer.strategy lrl.AsyncFSDP",
    "fsdp": "trainer.strategy lrl.AsyncFSDP",
}
"""Last word of a setting's name -> the setting here, or a sentence that begins "There is none"."""

REINFORCE_PLUS_PLUS = (
    "It is PPO with another baseline: --model.objective PPO --data.advantages ReinforcePlusPlus"
)
CLASSES = {
    "GRPO": "It is PPO with the group's advantages: --model.objective PPO --data.advantages GRPO",
    "DRGRPO": (
        "It is PPO with the group's mean: --model.objective PPO --data.advantages DrGRPO, and "
        "--model.normalise_by the number that data.max_response_tokens is"
    ),
    "DAPO": (
        "It is PPO with a higher upper bound: --model.objective PPO "
        "--model.objective.epsilon_high 0.28 --data.advantages GRPO, and data.max_skipped_per_step "
        "for its dynamic sampling"
    ),
    "RLOO": "It is a baseline: --model.objective REINFORCE --data.advantages RLOO",
    "REINFORCE++": REINFORCE_PLUS_PLUS,
    "REINFORCEPLUSPLUS": REINFORCE_PLUS_PLUS,
}
"""Objectives elsewhere that are an objective and a baseline here, in capitals."""


def setting(name: str) -> str:
    """Returns the sentence about a setting of another library; empty if none has such a name.

    Args:
        name: A name, of which the last word counts.
    """
    found = SETTINGS.get(name.rpartition(".")[2].strip("-").replace("-", "_").lower())
    if found is None:
        return ""
    return found if found.startswith("There is none") else f"Here it is {found}."


def objective(name: str) -> str:
    """Returns the sentence about an objective of another library; empty if none has it."""
    found = CLASSES.get(name.rpartition(".")[2].replace("_", "").replace("-", "").upper())
    return f"{found}." if found else ""
