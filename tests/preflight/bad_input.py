"""Words that make a healthy run wrong, one of each kind of fault: the words as a shell reads them, then
what the error must have; and words that look wrong, and with which a run starts.

`{in}` is the folder of `tests.preflight.broken_inputs`, `{tmp}` an empty one.
"""

from __future__ import annotations

import json

RANKER = (
    "--data.length_predictor LengthPredictor --data.length_predictor.ranker LanguageModelRanker"
)
CRITIC = "--model.critic lrl.Critic --model.critic.value_only_steps 0 --data.advantages GAE"
REFERENCE = "--model.reference lrl.Reference"
FSDP = "--trainer.devices 5 --trainer.strategy AsyncFSDP"
STRATEGY = "--trainer.strategy"
SERVER = f"{STRATEGY}.server"
EXTRA = f"{SERVER}.extra_args"
SKIPS = "--data.max_skipped_per_step 2"
TOOLS = (
    "--model.model {in}/models/tools --data.environment lrl.environments.Tools"
    """ --data.environment.tools '["tests.environments.tool_functions.add"]'"""
)
AGENT = (
    "--data.environment lrl.environments.Agent"
    " --data.environment.agent tests.environments.agents.adds"
)
LAUNCHER = (
    "--trainer.strategy.generator_devices 0 --trainer.devices 1 --trainer.strategy.launcher {}"
    " --trainer.strategy.launcher.jobs 1"
).format


def callback(name: str, **settings: object) -> str:
    """The words of one more callback."""
    words = [f"--trainer.callbacks+ {name}"]
    words += [f"--trainer.callbacks.{key} '{value}'" for key, value in settings.items()]
    return " ".join(words)


def only(*callbacks: object) -> str:
    """The words of these callbacks and no other."""
    return f"--trainer.callbacks '{json.dumps(callbacks)}'"


ROWS = json.dumps(
    {"class_path": "lrl.Prompts", "init_args": {"source": "{in}/data/rows.jsonl", "name": "rows"}}
)
EVALUATION = callback("Evaluation", prompts=ROWS)
SYNC = {"class_path": "lrl.callbacks.WeightSync"}
RARE = SYNC | {"init_args": {"every_n_steps": 4}}

WORDS = [
    ("--data.prompts.sorce x", "data.prompts", "sorce"),
    ("--model.objective grpo", "--model.objective PPO --data.advantages GRPO"),
    ("--model.objective GPSO", "model.objective", "Did you mean GSPO?"),
    ("--data.max_lag soon", "data.max_lag", "int", "soon"),
    ("--model broken_module.Policy", "SyntaxError", "broken_module.py, line 2"),
    ("--data.environment tests.environments.worlds.Unmade", "there is no level1.txt"),
    ("--config quickstrat", "Did you mean quickstart?", "Shipped are agent, calculator"),
    ("--config {in}/broken.yaml", "broken.yaml", "line 3"),
    ("--trainer.max_steps '${data.init_args.max_lagg}'", "data.init_args.max_lagg", "not found"),
]
"""What the command line cannot read."""

TRAINER = [
    ("--trainer.devices 1", "trainer.devices is 1", "generator_devices", "at least 2"),
    (f"{STRATEGY}.evaluation_generators 1", "none is left"),
    (f"{STRATEGY}.weight_transfer nccl", "weight_transfer", "nccl", "auto"),
    (f"{STRATEGY}.placement shared", "Set data.max_lag to 0"),
    (f"{FSDP} {STRATEGY}.replicas 3", "strategy.replicas is 3", "4 trainer ranks", "divisor"),
    (f"{FSDP} {STRATEGY}.tensor_parallel_size 2 --model.lora.rank 4", "model.lora"),
    (only(SYNC, SYNC), "trainer.callbacks", "keep one"),
    (only(RARE), "WeightSync.every_n_steps is 4", "data.max_lag is 1", "at least 3"),
    (callback("Evaluation", prompts=ROWS, samples=4), "Evaluation.samples is 4", "temperature 0"),
    (
        callback("Evaluation", prompts=ROWS, samples=64, temperature=1.0),
        "Evaluation.concurrency is 32",
        "at least 64",
    ),
    (callback("Evaluation", prompts=ROWS, temperature=0.005), "Evaluation.temperature is 0.005"),
    (callback("Evaluation", prompts=ROWS, by="[level]"), "Evaluation.by", "level", "answer"),
    (f"{EVALUATION} {EVALUATION}", "lrl.callbacks.Evaluation", "'rows'", "name"),
    (callback("Export", folder="{in}/models/whole"), "Export.folder", "models/whole"),
    ("--model.schedule cosine --trainer.max_steps -1", "model.schedule='cosine'", "max_steps"),
    (f"{LAUNCHER('Command')} {STRATEGY}.launcher.command true", "put {join}"),
    (
        f"{LAUNCHER('Given')} {STRATEGY}.evaluation_generators 1",
        "those of strategy.launcher write nothing else",
    ),
    (f"{SERVER}.max_model_len 95", "max_model_len is 95", "96"),
    (f"""{EXTRA} '{{"speculative-config": {{"method": "ngram"}}}}'""", "Leave speculative-config"),
    (f"""{EXTRA} '{{"top_p": 0.9}}'""", "extra_args", "top_p", "Leave it out"),
]

LIGHTNINGS = [
    ("--trainer.precision 64-true", "trainer.precision='64-true'", "bf16-mixed", "model.dtype"),
    ("--trainer.num_nodes 2", "trainer.num_nodes=2", "lrl.AsyncDDP"),
    ("--trainer.gradient_clip_val 0.5", "gradient_clip_val=0.5", "model.max_grad_norm"),
    ("--trainer.accumulate_grad_batches 2", "data.groups_per_step"),
    ("--trainer.val_check_interval 5", "Evaluation.every_n_steps"),
    ("--trainer.check_val_every_n_epoch 2", "Evaluation.every_n_steps"),
    ("--trainer.overfit_batches 2", "data.prompts.limit"),
    *(
        (callback(name, **how), f"trainer.callbacks has {name}")
        for name, how in (
            ("GradientAccumulationScheduler", {"scheduling": {0: 2}}),
            ("StochasticWeightAveraging", {"swa_lrs": 0.01}),
            ("ModelPruning", {"pruning_fn": "l1_unstructured"}),
            ("OnExceptionCheckpoint", {"dirpath": "."}),
            *((f"{tuned}Finder", {}) for tuned in ("BatchSize", "LearningRate")),
            *((name, {}) for name in ("BackboneFinetuning", "SpikeDetection", "WeightAveraging")),
        )
    ),
]
"""What of Lightning's would be ignored or wrong."""

SETTINGS = [
    (f"{TOOLS} {SERVER}.tool_parser null", "strategy.server.tool_parser is null", "such as hermes"),
    (
        f"{TOOLS} {SERVER}.tool_parser hermes --model.model {{in}}/models/whole",
        "chat template leaves out the tools",
    ),
    ("--data.max_turns 4", "data.max_turns is set", "there is no data.environment"),
    ("--data.environment tests.environments.worlds.LongStop", "LongStop.stop has", "4 tokens"),
    (f"{RANKER} --data.length_predictor.ranker.model no/such_model", "length_predictor.ranker"),
    (f"{CRITIC} --data.advantages GroupMean", "model.critic is set", "lrl.advantages.GAE"),
    (f"{CRITIC} --data.advantages ArCHer", "data.advantages ArCHer", "lrl.TurnCritic"),
    (
        f"{CRITIC} --model.objective TBA {REFERENCE}",
        "model.objective TBA",
        "data.advantages is GAE",
    ),
    (f"{CRITIC} --model.critic.model no/such_model", "model.critic.model='no/such_model'"),
    (f"{CRITIC} {SKIPS}", "data.max_skipped_per_step is 2", "GAE", "leave it out"),
    (
        "--model.reference lrl.Teacher --model.reference.url http://127.0.0.1:9",
        *("model.reference.url cannot be the run's teacher", "http://127.0.0.1:9/tokenize"),
    ),
    (
        f"{REFERENCE} --model.reference.model {{in}}/models/qwen2"
        " --model.reference.refresh_every_n_steps 5",
        *("model.reference.refresh_every_n_steps is 5", "another architecture"),
    ),
    (f"--model.objective GSPO {AGENT}", "model.objective GSPO", "branches", "false"),
    *(
        (f"--data.stragglers mask --model.objective {words}", "weighs whole responses", "wait")
        for words in ("TOPR", "GSPO", "TIS --model.objective.level sequence", f"TBA {REFERENCE}")
    ),
]

DATA = [
    ("--data.prompts {in}/data/broken.jsonl", "broken.jsonl", "line 2"),
    ("--data.prompts {in}/data/no-answers.jsonl", "column `answer`", "exact_match"),
    ("--data.prompts {in}/data/times.jsonl --data.rewards GSM8K", "row 8 of times", "'12:30'"),
    ("--data.max_prompt_tokens 3", "data.max_prompt_tokens=3", "too_long=skip"),
    ("--data.prompts {in}/data/mostly-long.jsonl --data.prompts.too_long skip", "3 prompts"),
    (
        "--data.prompts {in}/data/system.jsonl --model.model {in}/models/strict-template",
        *("no system here", "chat template"),
    ),
    ("--data.prompts {in}/data/surrogate.jsonl", "Row 3 of surrogate", "cannot encode"),
    ("--data.rewards lrl.rewards.GSM9K", "Did you mean GSM8K?"),
    ("--data.rewards trl_rewards:brief", "Define it as `def brief(prompt, response, **columns)`"),
]

MODELS = [
    ("--model.model ./nope", "model.model='./nope': there is no such folder"),
    ("--model.model no_such_module:make", "no_such_module"),
    *(
        (f"--model.model {{in}}/models/{name}", f"models/{name}", *named)
        for name, *named in (
            ("own-code", "code of its own"),
            ("other-size", "config.json", "lm_head.weight"),
            ("more-layers", "9 weights are missing", "layers.2"),
            ("longrope", "longrope", "beyond 64 tokens", "may have 96"),
            ("dynamic", "dynamic", "beyond 64 tokens"),
            ("capped", "attn_logit_softcapping is 50", "model.attention", "eager"),
            ("cut-weights", "deserializing header"),
            ("larger-tokenizer", "309", "259 rows"),
            ("quantised", "quant_method mxfp4", "bfloat16 copy"),
        )
    ),
    (f"{REFERENCE} --model.reference.model {{in}}/models/capped", "attn_logit_softcapping is 50"),
]

RESUMES = [
    ("--ckpt_path {tmp}/none.ckpt", "no checkpoint"),
    ("--ckpt_path last", "is 'last'", "no checkpoint in"),
    ("--ckpt_path {in}/checkpoints/text.ckpt", "text.ckpt", "read"),
    ("--ckpt_path {in}/checkpoints/parts", "AsyncFSDP", "lrl export"),
    ("--ckpt_path {in}/checkpoints/other-model.ckpt", "is of another model", "model.lora"),
    ("--ckpt_path {in}/checkpoints/other-groups.ckpt", "groups_per_step 4", "resume with"),
    ("--ckpt_path {in}/checkpoints/other-order.ckpt", "data.prompts has changed", "seed"),
    ("--ckpt_path {in}/checkpoints/other-module.ckpt", "RolloutDataModule"),
]

CASES = {
    words: named
    for words, *named in WORDS + TRAINER + LIGHTNINGS + SETTINGS + DATA + MODELS + RESUMES
}

HEALTHY = {
    "unused settings, repeated prompts, bare names": (
        "--model.model {in}/models/sampling --data.prompts.source {in}/data/twins.jsonl"
        " --trainer.strategy AsyncSingleDevice --data.rewards ExactMatch"
    ),
    "chats, and added tokens that no prompt has": (
        "--model.model {in}/models/added-tokens --data.prompts.source {in}/data/chats.jsonl"
    ),
    "no template, long micro-batches, groups beyond a generator": (
        f"--model.model {{in}}/models/no-template --data.micro_batch_tokens 8 {SERVER}.max_num_seqs 2"
    ),
    "a language model that ranks prompts": (
        f"{RANKER} --data.length_predictor.ranker.model {{in}}/models/whole"
    ),
    "its own checkpoint, no sync that is named, no progress bar": (
        f"--ckpt_path {{in}}/checkpoints/whole.ckpt {only({'class_path': 'lrl.callbacks.RolloutLog'})}"
        " --trainer.enable_progress_bar false"
    ),
    "an attention that applies the model's cap": (
        "--model.model {in}/models/capped --model.attention eager"
    ),
    "texts below the length at which positions change": (
        "--model.model {in}/models/longrope --data.max_prompt_tokens 32"
    ),
}
