"""Settings and objectives under the names that other libraries give them."""

SETTINGS = {
    "data.rollouts_per_group": "num_generations num_return_sequences group_size rollout_n n",
    "data.groups_per_step": "per_device_train_batch_size batch_size train_batch_size "
    "ppo_mini_batch_size generation_batch_size gradient_accumulation_steps",
    "data.micro_batch_tokens": "micro_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    "data.max_response_tokens": "max_completion_length max_response_length response_length "
    "max_completion_tokens max_new_tokens max_tokens",
    "data.max_prompt_tokens": "max_prompt_length prompt_length max_seq_length",
    "data.prompts": "train_dataset train_files dataset dataset_name",
    "data.prompts.prompt_column": "prompt_key",
    "data.prompts.too_long": "filter_overlong_prompts truncation",
    "data.prompts.chat": "chat_template apply_chat_template",
    "data.mask_truncated": "mask_truncated_completions",
    "data.environment": "tools multi_turn environment_factory",
    "the callback lrl.callbacks.Evaluation": "eval_dataset val_files eval_strategy eval_steps "
    "test_freq",
    "data.rewards": "reward_funcs reward_func reward_function reward_fn reward_weights",
    "data.advantages": "scale_rewards norm_adv_by_std_in_grpo adv_estimator gamma lam gae_lambda",
    "data.max_skipped_per_step": "dynamic_sampling filter_groups",
    "epsilon_low and epsilon_high of model.objective lrl.objectives.PPO": "epsilon epsilon_low "
    "epsilon_high cliprange clip_ratio clip_ratio_low clip_ratio_high",
    "model.objective": "importance_sampling_level vllm_importance_sampling_correction",
    "model.normalise_by": "loss_type loss_agg_mode",
    "model.reference": "beta kl_coef kl_loss_coef use_kl_loss use_kl_in_reward kl_penalty ref_model "
    "sync_ref_model teacher_model",
    "model.critic": "critic_warmup vf_coef",
    "model.lr": "learning_rate",
    "model.schedule": "lr_scheduler_type warmup_style",
    "model.warmup_steps": "warmup_ratio lr_warmup_steps_ratio lr_warmup_steps",
    "model.max_grad_norm": "grad_clip clip_grad",
    "model.betas": "adam_beta1 adam_beta2",
    "`configure_optimizers` of a lrl.PolicyModule of your own": "optim optimizer",
    "model.model": "model_name_or_path model_name pretrained_model model_path",
    "model.attention": "attn_implementation",
    "model.kernels": "use_liger_kernel torch_compile use_torch_compile",
    "model.dtype": "torch_dtype bf16 fp16",
    "model.gradient_checkpointing": "enable_gradient_checkpointing",
    "model.lora": "peft_config use_peft r lora_r lora_rank lora_alpha lora_target_modules",
    "data.max_lag": "max_staleness staleness staleness_threshold max_off_policy_steps",
    "trainer.strategy.generator_devices": "use_vllm vllm_mode num_generators",
    "trainer.strategy.server.max_model_len": "vllm_max_model_length",
    "trainer.strategy.server.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "trainer.strategy.server.tensor_parallel_size": "vllm_tensor_parallel_size",
    "every_n_steps of lrl.callbacks.WeightSync": "weight_sync_steps trigger_parameter_sync_step",
    "trainer.max_epochs": "num_train_epochs total_epochs epochs",
    "trainer.max_steps": "total_training_steps steps",
    "the callback ModelCheckpoint": "save_steps save_freq save_total_limit",
    "trainer.log_every_n_steps": "logging_steps",
    "the callback lrl.callbacks.RolloutLog": "log_completions num_completions_to_print",
    "trainer.logger": "report_to run_name experiment_name project_name",
    "trainer.default_root_dir": "output_dir default_local_dir",
    "--ckpt_path": "resume_from_checkpoint resume_mode resume_from_path",
    "--seed_everything": "seed",
    "trainer.devices": "n_gpus_per_node num_gpus gpus num_devices",
    "trainer.num_nodes": "nnodes",
    "trainer.strategy lrl.AsyncFSDP": "deepspeed fsdp",
}
"""The setting here -> its names in TRL, verl and transformers, for whom the nearest spelling would
mislead (docs/from_trl.md, docs/from_verl.md)."""
ABSENT = (
    "top_p top_k min_p repetition_penalty generation_kwargs do_sample num_iterations ppo_epochs "
    "steps_per_generation use_dynamic_bsz use_remove_padding entropy_coef entropy_coeff ent_coef"
)
"""Settings elsewhere that have no counterpart."""
OBJECTIVES = {
    "GRPO": "--model.objective PPO --data.advantages GRPO",
    "DRGRPO": "--model.objective PPO --data.advantages DrGRPO",
    "DAPO": "--model.objective PPO --model.objective.epsilon_high 0.28 --data.advantages GRPO",
    "RLOO": "--model.objective REINFORCE --data.advantages RLOO",
    "REINFORCE++": "--model.objective PPO --data.advantages ReinforcePlusPlus",
    "REINFORCEPLUSPLUS": "--model.objective PPO --data.advantages ReinforcePlusPlus",
}
"""Objectives elsewhere that are an objective and a baseline here, in capitals."""


def setting(word: str) -> str:
    """Returns the sentence about another library's setting; empty without one."""
    if word in ABSENT.split():
        return "There is none here; docs/from_trl.md says why."
    found = (here for here, elsewhere in SETTINGS.items() if word in elsewhere.split())
    return next((f"lrl's name for it is {here}." for here in found), "")
