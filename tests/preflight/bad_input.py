"""Words that make a healthy run wrong, one of each kind of fault: the words as a shell reads them, then
what the error must have.

`{in}` is the folder of `tests.preflight.broken_inputs`, `{tmp}` an empty one.
"""

from __future__ import annotations

import json

Cases = dict[str, tuple[str, ...]]

RANKER = (
    "--data.length_predictor LengthPredictor --data.length_predictor.ranker LanguageModelRanker"
)
CRITIC = "--model.critic lrl.Critic --model.critic.value_only_steps 0 --data.advantages GAE"
REFERENCE = "--model.reference lrl.Reference"
FSDP = "--trainer.devices 5 --trainer.strategy AsyncFSDP"
SERVER = "--trainer.strategy.server"
SKIPS = "--data.max_skipped_per_step 2"
TOOLS = (
    "--model.model {in}/models/tools --data.environment lrl.environments.Tools"
    """ --data.environment.tools '["tests.environments.tool_functions.add"]'"""
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

WORDS: Cases = {
    "a misspelt key": ("--data.max_lagg 1", "data.max_lagg", "Did you mean data.max_lag?"),
    "a misspelt key two classes deep": (
        f"{SERVER}.max_num_seq 1",
        "Did you mean trainer.strategy.server.max_num_seqs?",
    ),
    "a misspelt key in a config": (
        "--config {in}/misspelt.yaml",
        "data.stragler: there is no such setting",
        "Did you mean data.stragglers?",
    ),
    "a misspelt key of the prompts": ("--data.prompts.sorce x", "data.prompts", "sorce"),
    "a key of a class inside": (
        "--trainer.strategy.max_num_seqs 1",
        "Did you mean trainer.strategy.server.max_num_seqs?",
    ),
    "a word that belongs to no key": ("quickstart", "Did you mean --config quickstart?"),
    "a setting of another library": ("--data.num_generations 8", "data.rollouts_per_group"),
    "an objective of another library": (
        "--model.objective grpo",
        "model.objective",
        "--model.objective PPO --data.advantages GRPO",
    ),
    "a wrong type": ("--data.max_lag soon", "data.max_lag", "int", "soon"),
    "a number for a group": ("--config '{trainer: 5}'", "trainer is 5", "its settings"),
    "neither a choice nor a number": (
        "--model.normalise_by mean",
        *("model.normalise_by", "'token', 'sequence'", "int"),
    ),
    "a setting of a callback that is no number": (
        callback("Health", steps="few"),
        *("trainer.callbacks.steps", "int", "few"),
    ),
    "a list on the command line that is cut": (
        "--model.betas '[0.9, 0.95'",
        *("model.betas", "[0.9, 0.95"),
    ),
    "null for what has no default": ("--model.model null", "are required: model"),
    "null for a number": ("--model.lr null", "model.lr: expected float", "None"),
    "a launcher without its jobs": (
        "--trainer.strategy.launcher Ray",
        *("trainer.strategy.launcher", "are required: jobs"),
    ),
    "an objective that is not there": (
        "--model.objective GPSO",
        *("model.objective", "Did you mean GSPO?"),
    ),
    "a module that is not there": (
        "--trainer.callbacks+ lrl.callbaks.WeightSync",
        *("trainer.callbacks", "Did you mean lrl.callbacks?"),
    ),
    "a strategy in lower case": ("--trainer.strategy asyncddp", "Did you mean AsyncDDP?"),
    "a class whose module is broken": (
        "--model broken_module.Policy",
        *("model: broken_module cannot be imported: SyntaxError", "broken_module.py, line 2"),
    ),
    "a reward for an environment": (
        "--data.environment lrl.rewards.ExactMatch",
        *("data.environment", "subclass of Environment"),
    ),
    "a class that cannot be made": (
        "--data.environment tests.environments.broken.Unmade",
        "there is no level1.txt",
    ),
    "a data set in the place of its group": (
        "--data {in}/data/rows.jsonl",
        *("data", "rows.jsonl"),
    ),
    "a misspelt recipe": (
        "--config quickstrat",
        *("--config quickstrat", "Did you mean quickstart?", "Shipped are agent, calculator"),
    ),
    "a config that is no YAML": ("--config {in}/broken.yaml", "broken.yaml: line 3"),
    "a group's own config that is no YAML": (
        "--config {in}/trainer-of-broken.yaml",
        *("trainer", "broken.yaml", "line 3"),
    ),
    "an interpolation that leads nowhere": (
        "--trainer.max_steps '${data.init_args.max_lagg}'",
        *("trainer.max_steps", "data.init_args.max_lagg", "not found"),
    ),
}
"""What the command line cannot read."""

TRAINER: Cases = {
    "no device left to train": (
        "--trainer.devices 1",
        *("trainer.devices is 1", "generator_devices", "at least 2"),
    ),
    "a GPU that is not there": ("--trainer.accelerator gpu", "gpu"),
    "a strategy without generators": (
        "--trainer.strategy ddp --trainer.devices 1",
        "lrl.AsyncSingleDevice",
    ),
    "every generator kept for evaluation": (
        "--trainer.strategy.evaluation_generators 1",
        "none is left",
    ),
    "a transport without its hardware": (
        "--trainer.strategy.weight_transfer nccl",
        *("weight_transfer", "nccl", "shared_memory"),
    ),
    "turns and answers written ahead": (
        "--trainer.strategy.placement shared",
        "Set data.max_lag to 0",
    ),
    "copies that do not divide the ranks": (
        f"{FSDP} --trainer.strategy.replicas 3",
        *("strategy.replicas is 3", "4 trainer ranks", "divisor"),
    ),
    "one group for all ranks": (
        f"{FSDP} --trainer.strategy.tensor_parallel_size 4",
        *("strategy.tensor_parallel_size is 4", "two or more"),
    ),
    "adapters of divided layers": (
        f"{FSDP} --trainer.strategy.tensor_parallel_size 2 --model.lora.rank 4",
        *("strategy.tensor_parallel_size is 2", "model.lora"),
    ),
    "two syncs": (only(SYNC, SYNC), "trainer.callbacks", "keep one"),
    "syncs too rare for the lag": (
        only(SYNC | {"init_args": {"every_n_steps": 4}}),
        *("WeightSync.every_n_steps is 4", "data.max_lag is 1", "at least 3"),
    ),
    "an evaluation of equal samples": (
        callback("Evaluation", prompts=ROWS, samples=4),
        *("Evaluation.samples is 4", "temperature 0"),
    ),
    "an evaluation by a column that is not there": (
        callback("Evaluation", prompts=ROWS, by="[level]"),
        *("Evaluation.by", "level", "answer"),
    ),
    "an evaluation of a file that is not there": (
        callback("Evaluation", prompts="{tmp}/none.jsonl"),
        *("Evaluation.prompts", "none.jsonl"),
    ),
    "a checkpoint by an evaluation that is not there": (
        callback("ModelCheckpoint", monitor="eval/rows/accuracy"),
        *("ModelCheckpoint.monitor is 'eval/rows/accuracy'", "no lrl.callbacks.Evaluation"),
    ),
    "an end by a number that no evaluation has": (
        f"{EVALUATION} {callback('EarlyStopping', monitor='eval/row/accuracy')}",
        *("EarlyStopping.monitor is 'eval/row/accuracy'", "Did you mean eval/rows/accuracy?"),
    ),
    "two evaluations of one name": (
        f"{EVALUATION} {EVALUATION}",
        *("lrl.callbacks.Evaluation", "'rows'", "name"),
    ),
    "an export over the model itself": (
        callback("Export", folder="{in}/models/whole"),
        *("Export.folder", "models/whole"),
    ),
    "a schedule without an end": (
        "--model.schedule cosine --trainer.max_steps -1",
        *("model.schedule='cosine'", "trainer.max_steps"),
    ),
}

MEMBERS: Cases = {
    "a launcher without srun": (
        LAUNCHER("Slurm"),
        *("strategy.launcher is Slurm", "no srun on the path"),
    ),
    "a launcher whose command starts none": (
        f"{LAUNCHER('Command')} --trainer.strategy.launcher.command true",
        *("Command.command is 'true'", "put {join}"),
    ),
    "a launcher and evaluation generators": (
        f"{LAUNCHER('Given')} --trainer.strategy.evaluation_generators 1",
        *("strategy.evaluation_generators is 1", "leave strategy.launcher out"),
    ),
    "scorers without srun": (
        "--data.worker_launcher Slurm --data.worker_launcher.jobs 1",
        *("data.worker_launcher is Slurm", "no srun on the path"),
    ),
}

SERVERS: Cases = {
    "more memory than there is": (
        f"{SERVER}.kv_cache_gib 100000.0",
        *("kv_cache_gib", "Memory", "GiB are needed"),
    ),
    "a context shorter than prompt and answer": (
        f"{SERVER}.max_model_len 95",
        *("max_model_len is 95", "96"),
    ),
    "speculative decoding on a CPU": (
        f"""{SERVER}.extra_args '{{"speculative-config": {{"method": "ngram"}}}}'""",
        *("strategy.server.extra_args", "CPU", "Leave speculative-config out"),
    ),
    "another sampling than the run's": (
        f"""{SERVER}.extra_args '{{"top_p": 0.9}}'""",
        *("extra_args", "top_p", "Leave it out"),
    ),
}

SETTINGS: Cases = {
    "a negative lag": ("--data.max_lag -1", "data.max_lag is -1", "at least 0"),
    "tools without a parser": (
        f"{TOOLS} {SERVER}.tool_parser null",
        *("strategy.server.tool_parser is null", "such as hermes"),
    ),
    "a template without tools": (
        f"{TOOLS} {SERVER}.tool_parser hermes --model.model {{in}}/models/whole",
        "chat template leaves out the tools of data.environment",
    ),
    "turns without an environment": (
        "--data.max_turns 4",
        *("data.max_turns is set", "there is no data.environment"),
    ),
    "the stop of a turn in many tokens": (
        "--data.environment tests.environments.broken.LongStop",
        *("LongStop.stop has 'stop'", "4 tokens"),
    ),
    "a step larger than the data set": (
        "--data.groups_per_step 9",
        *("groups_per_step is 9", "8 prompts", "at most 8"),
    ),
    "a ranker's model that is not there": (
        f"{RANKER} --data.length_predictor.ranker.model no/such_model",
        *("data.length_predictor.ranker", "no/such_model", "folder in Hugging Face format"),
    ),
    "a critic whose values nobody uses": (
        f"{CRITIC} --data.advantages GroupMean",
        *("model.critic is set", "data.advantages GroupMean", "lrl.advantages.GAE"),
    ),
    "advantages of values without a critic": (
        "--data.advantages GAE",
        *("data.advantages GAE needs the values of a critic", "model.critic to lrl.Critic"),
    ),
    "advantages of turns beside a critic of tokens": (
        f"{CRITIC} --data.advantages ArCHer",
        *("data.advantages ArCHer needs the values", "lrl.TurnCritic"),
    ),
    "a critic beside an objective of the group": (
        f"{CRITIC} --model.objective TBA {REFERENCE}",
        *("model.objective TBA", "data.advantages is GAE"),
    ),
    "a critic that learns alone to the end": (
        f"{CRITIC} --model.critic.value_only_steps 50 --trainer.max_steps 50",
        *("model.critic.value_only_steps is 50", "trainer.max_steps 50"),
    ),
    "a critic that is not there": (
        f"{CRITIC} --model.critic.model no/such_model",
        *("model.critic.model='no/such_model'", "folder in Hugging Face format"),
    ),
    "equal groups skipped beside a critic": (
        f"{CRITIC} {SKIPS}",
        *("data.max_skipped_per_step is 2", "GAE", "leave it out"),
    ),
    "equal groups skipped beside a KL in the reward": (
        f"{REFERENCE} --model.reference.coefficient 0.1 --model.reference.penalty_in reward {SKIPS}",
        *("data.max_skipped_per_step is 2", "model.reference Reference", "leave it out"),
    ),
    "a teacher whose server is not there": (
        "--model.reference lrl.Teacher --model.reference.url http://127.0.0.1:9",
        *("model.reference.url cannot be the run's teacher", "http://127.0.0.1:9/tokenize"),
    ),
    "a reference of another architecture that is to follow the policy": (
        f"{REFERENCE} --model.reference.model {{in}}/models/qwen2"
        " --model.reference.refresh_every_n_steps 5",
        *("model.reference.refresh_every_n_steps is 5", "models/qwen2", "another architecture"),
    ),
    "whole responses and branches": (
        "--model.objective GSPO --data.environment lrl.environments.Agent"
        " --data.environment.agent tests.environments.agents.adds",
        *("model.objective GSPO", "branches", "data.environment", "false"),
    ),
    **{
        f"{words.split()[0]} on responses without their old tokens": (
            f"--data.stragglers mask --model.objective {words}",
            *("weighs whole responses", "data.stragglers mask", "wait"),
        )
        for words in (
            *("TOPR", "GSPO", "TIS --model.objective.level sequence"),
            f"TBA {REFERENCE}",
        )
    },
}

DATA: Cases = {
    "a data set that is not there": ("--data.prompts {in}/data/none.jsonl", "No such file"),
    "a line that is cut": ("--data.prompts {in}/data/broken.jsonl", "broken.jsonl", "line 2"),
    "a column that the reward reads": (
        "--data.prompts {in}/data/no-answers.jsonl",
        *("'answer'", "exact_match"),
    ),
    "a reference that is not one number": (
        "--data.prompts {in}/data/times.jsonl --data.rewards GSM8K",
        *("data.prompts", "'gsm8k'", "row 8 of times", "'12:30'", "exactly one"),
    ),
    "prompts that are too long": (
        "--data.max_prompt_tokens 3",
        *("data.prompts: ", "data.max_prompt_tokens=3", "too_long=skip"),
    ),
    "prompts of which too few are left": (
        "--data.prompts {in}/data/mostly-long.jsonl --data.prompts.too_long skip",
        *("data.groups_per_step is 4", "3 prompts", "data.max_prompt_tokens"),
    ),
    "a source that cannot be imported": (
        "--data.prompts.source no_such_module:rows",
        *("data.prompts", "'no_such_module'", "module:function"),
    ),
    "a chat template that refuses the messages": (
        "--data.prompts {in}/data/system.jsonl --model.model {in}/models/strict-template",
        *("no system here", "chat template"),
    ),
    "a prompt that no tokenizer encodes": (
        "--data.prompts {in}/data/surrogate.jsonl",
        *("Row 3 of surrogate, column 'prompt'", "half of a surrogate pair"),
    ),
    "a reward that cannot be imported": (
        "--data.rewards rr:f",
        *("'rr:f'", "No module named 'rr'", "file.py:function"),
    ),
    "a misspelt reward": ("--data.rewards lrl.rewards.GSM9K", "Did you mean GSM8K?"),
    "a reward of TRL": (
        "--data.rewards trl_rewards:brief",
        *("brief takes `completions`", "completions=[response]"),
    ),
}

MODEL_FAULTS: Cases = {
    "no-config": ("config",),
    "broken-config": ("JSON",),
    "unknown-type": ("oddball",),
    "own-code": ("code of its own",),
    "tokenizer-code": ("code of its own",),
    "odd-heads": ("attention heads",),
    "other-size": ("config.json", "embed_tokens"),
    "more-layers": ("lacks weights", "layers.2"),
    "longrope": ("longrope", "beyond 64 tokens", "may have 96"),
    "dynamic": ("dynamic", "beyond 64 tokens"),
    "capped": ("attn_logit_softcapping is 50", "sdpa", "model.attention", "eager"),
    "no-weights": ("has no weights",),
    "cut-weights": ("model.safetensors cannot be read",),
    "broken-index": ("model.safetensors.index.json",),
    "no-tokenizer": ("AutoTokenizer cannot open it",),
    "broken-tokenizer": ("AutoTokenizer",),
    "larger-tokenizer": ("309", "259 rows"),
    "not-a-language-model": ("AutoModelForCausalLM",),
    "quantised": ("quant_method mxfp4", "bfloat16 copy"),
}
"""Each folder of a model, and its fault."""
MODELS: Cases = {
    "a folder that is not there": (
        "--model.model ./nope",
        "model.model='./nope': there is no such folder",
    ),
    "a model that cannot be imported": ("--model.model no_such_module:make", "no_such_module"),
    **{
        f"a model with {name}": (f"--model.model {{in}}/models/{name}", f"models/{name}", *named)
        for name, named in MODEL_FAULTS.items()
    },
    **{
        f"a reference with {name}": (
            f"{REFERENCE} --model.reference.model {{in}}/models/{name}",
            *("model.reference.", *MODEL_FAULTS[name][:1]),
        )
        for name in ("capped", "no-weights", "quantised")
    },
}

RESUMES: Cases = {
    name: (f"--ckpt_path {path}", *named)
    for name, (path, *named) in {
        "a checkpoint that is not there": ("{tmp}/none.ckpt", "no checkpoint"),
        "a last checkpoint where there is none": ("last", "is 'last'", "no checkpoint in"),
        "a best checkpoint of a run to come": ("best", 'ckpt_path="best"', "ModelCheckpoint"),
        "a checkpoint that is text": ("{in}/checkpoints/text.ckpt", "text.ckpt", "read"),
        "a folder that is no checkpoint": ("{in}/checkpoints/empty", "no checkpoint"),
        "parts for a whole policy": ("{in}/checkpoints/parts", "AsyncFSDP", "lrl export"),
        "no weights": ("{in}/checkpoints/no-weights.ckpt", "no-weights", "state_dict"),
        "another model": ("{in}/checkpoints/other-model.ckpt", "another model than model.model"),
        "other groups": ("{in}/checkpoints/other-groups.ckpt", "groups_per_step 4", "resume with"),
        "another order": ("{in}/checkpoints/other-order.ckpt", "data.prompts has changed", "seed"),
        "another kind of run": ("{in}/checkpoints/other-module.ckpt", "RolloutDataModule"),
    }.items()
}

CASES = {
    f"{kind}: {name}": case
    for kind, cases in {
        "words": WORDS,
        "trainer": TRAINER,
        "members": MEMBERS,
        "servers": SERVERS,
        "settings": SETTINGS,
        "data": DATA,
        "models": MODELS,
        "resumes": RESUMES,
    }.items()
    for name, case in cases.items()
}

HEALTHY = {
    "the run that the cases change": "",
    "a model with sampling settings of its own, which are not used": (
        "--model.model {in}/models/sampling"
    ),
    "a model that brings code which is not needed": "--model.model {in}/models/code-unused",
    "added tokens that no prompt has": "--model.model {in}/models/added-tokens",
    "a strategy by its bare name": "--trainer.strategy AsyncSingleDevice",
    "a setting that is that of another class": "--model.warmup_steps '${data.init_args.max_lag}'",
    "a setting that is one of the trainer's": "--data.groups_per_step '${trainer.max_steps}'",
    "one reward that is no list": "--data.rewards lrl.quickstart.task:correct",
    "one reward by the name of its class": "--data.rewards ExactMatch",
    "prompts that repeat": "--data.prompts.source {in}/data/twins.jsonl",
    "chats for a tokenizer with a template": "--data.prompts.source {in}/data/chats.jsonl",
    "tools for a template that shows them": f"{TOOLS} {SERVER}.tool_parser hermes",
    "plain text for one without": "--model.model {in}/models/no-template",
    "a language model that ranks prompts": (
        f"{RANKER} --data.length_predictor.ranker.model {{in}}/models/whole"
    ),
    "a checkpoint of the run itself": "--ckpt_path {in}/checkpoints/whole.ckpt",
    "callbacks without a sync, which every run has": only(
        {"class_path": "lrl.callbacks.RolloutLog"}
    ),
    "no strategy and no callbacks": "--config {in}/bare.yaml",
    "no progress bar, neither Lightning's nor lrl's": ("--trainer.enable_progress_bar false"),
    "an attention that applies the model's cap": (
        "--model.model {in}/models/capped --model.attention eager"
    ),
    "texts below the length at which positions change": (
        "--model.model {in}/models/longrope --data.max_prompt_tokens 32"
    ),
    "long micro-batches and groups beyond a generator": (
        f"--data.micro_batch_tokens 8 {SERVER}.max_num_seqs 2"
    ),
}
