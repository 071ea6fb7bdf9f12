"""jsonargparse's errors in one line: the setting, its fault, and the nearest name.

jsonargparse nests a message by indentation: a level for each class on the way to the setting, and a
line for each type that the setting may have. The deepest line says the fault; the levels around it
make the setting's whole name.
"""

import re
from collections.abc import Iterable
from importlib import import_module
from typing import NamedTuple

from lrl.cli import fit_help
from lrl.cli.recipes import recipes
from lrl.system import import_by_name

ELSEWHERE = {
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
NOISE = (
    *("Does not validate", "Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>"),
    *("Problem with given class_path", "Subclass types expect", "a class path", "a dict with"),
)
"""Lines that every setting of several types has, or of a class."""
EVERY_CALLBACK = "lightning.Callback"
"""jsonargparse also tries each setting of the last callback on this class, which has none."""
UNKNOWN = re.compile(r"unrecognized arguments: (-*[^\s=+]+)|[Oo]ption '([^']+)'")
NO_CLASS = re.compile(
    r"Expected a dot import path string: (.+)"
    r"|Problem with given class_path '([^']+)'"
    r"|Expected a path but ([\w.]+) either not accessible"
    r"|Unexpected import path format: (.+)"
)
CLASSES = (
    *(*import_by_name.ROOMS, "lrl.advantages", "lrl.environments", "lrl.routing.dispatch"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
)
"""Where the classes are that a setting may name."""


class Line(NamedTuple):
    """A line of the message."""

    text: str
    setting: str
    """Whole name of the setting that it is about."""
    owner: str
    """Path of the innermost class around it."""
    depth: int


def explain(message: str) -> str:
    """Returns the text of one error for a parser's message."""
    lines = sorted(_lines(message), key=lambda line: -line.depth)
    for line in lines:
        if unknown := UNKNOWN.search(line.text):
            return _no_setting(unknown[1] or unknown[2], line)
    for line in lines:
        if (match := NO_CLASS.search(line.text)) and (text := _no_class(match, line.setting)):
            return text
    faults = [line for line in lines if line.setting and not line.text.startswith(NOISE)]
    if not faults:
        return without_noise(message)
    setting = max(faults, key=lambda line: line.setting.count(".")).setting
    texts = dict.fromkeys(line.text for line in faults if line.setting == setting)
    certain = [text for text in texts if not text.startswith("Not a valid subclass")]
    return f"{setting}: {'; or '.join(certain or texts)}"


def without_noise(message: str) -> str:
    """Returns a constructor's error without the other types that its setting might have."""
    lines = [line.strip(" -") for line in message.splitlines()]
    own = [line for line in lines if not line.startswith((*NOISE, "Expected a <class"))]
    return " ".join(dict.fromkeys(own or lines))


def _lines(message: str) -> list[Line]:
    """Returns the lines that say something, each with the names around it."""
    around: list[Line] = []
    found = []
    for line in filter(str.strip, message.splitlines()):
        depth = len(line) - len(line.lstrip())
        around = [one for one in around if one.depth < depth]
        setting, owner = (around[-1].setting, around[-1].owner) if around else ("", "")
        if key := re.search(r'[Pp]arser key "([^"]+)"', line):
            setting = f"{setting}.{key[1]}".lstrip(".")
        text = re.sub(r'^[Pp]arser key "[^"]+":\s*', "", line.strip(" -"))
        if text and owner != EVERY_CALLBACK:
            found.append(Line(text, setting, owner, depth))
        if kind := re.search(r"Problem with given class_path '([^']+)'", line):
            owner = kind[1]
        around.append(Line("", setting, owner, depth))
    return found


def _no_setting(word: str, line: Line) -> str:
    name = word.replace(".init_args.", ".")
    whole = f"{line.setting}.{name}".lstrip(".")
    own: list[str] = []
    if line.owner:
        kind = import_by_name.function(line.owner)
        own = [one.name for one in fit_help.settings_of(kind, f"{line.setting}.")]
    return f"{whole}: there is no such setting.{_instead(name, own)}"


def _instead(name: str, known: Iterable[str]) -> str:
    """Returns what a wrong name should be; empty if nothing is near."""
    if name in recipes():
        return f" Did you mean --config {name}?"
    last = name.rpartition(".")[2].strip("-").replace("-", "_").lower()
    if last in ABSENT.split():
        return " There is none here; docs/from_trl.md says why."
    for setting, elsewhere in ELSEWHERE.items():
        if last in elsewhere.split():
            return f" lrl's name for it is {setting}."
    here: dict[str, list[str]] = {}
    for one in dict.fromkeys([*known, *fit_help.all_settings()]):
        here.setdefault(one.rpartition(".")[2], []).append(one)
    near = import_by_name.nearest(last, here)
    return f" Did you mean {' or '.join(here[near])}?" if near else ""


def _no_class(match: re.Match[str], setting: str) -> str:
    """Returns the error about the name of a class; empty if there is such a class."""
    name = next(filter(None, match.groups()))
    letters = name.rpartition(".")[2].replace("_", "").replace("-", "").upper()
    if objective := OBJECTIVES.get(letters):
        return f"{setting}: there is no class {name!r}. In lrl it is {objective}."
    if "." in name:
        try:
            import_by_name.function(name)
        except ValueError as error:
            return f"{setting}: {error}"
        return ""
    public = [one for room in CLASSES for one in import_by_name.public_names(import_module(room))]
    near = import_by_name.did_you_mean(name, [one for one in public if one[0].isupper()])
    return f"{setting}: there is no class {name!r}.{near or ' Write module.Class.'}"
