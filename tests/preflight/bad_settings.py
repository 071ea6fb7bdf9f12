"""Settings that a user may get wrong; how a case is written: `tests.preflight.bad_words`."""

from __future__ import annotations

import json

from tests.preflight.bad_words import Case, callback, evaluation, extra, monitor, only, setting

SYNC = "lrl.callbacks.WeightSync"
RANKER = (
    "--data.length_predictor",
    "lrl.routing.length_predictor.LengthPredictor",
    "--data.length_predictor.ranker",
    "LanguageModelRanker",
)


def fsdp(named: tuple[str, ...], **settings: object) -> Case:
    """Returns the case of AsyncFSDP with these settings."""
    words = [
        word
        for name, value in settings.items()
        for word in (f"--trainer.strategy.{name}", str(value))
    ]
    return ("--trainer.devices", "5", "--trainer.strategy", "AsyncFSDP", *words), named


def critic(words: tuple[str, ...], named: tuple[str, ...]) -> Case:
    """Returns the case of a critic and its advantages, with these words after them."""
    learning = ("--model.critic", "lrl.Critic", "--model.critic.value_only_steps", "0")
    return (*learning, "--data.advantages", "GAE", *words), named


def launched(
    named: tuple[str, ...], *words: str, generator_devices: str = "0", kind: str = "Given"
) -> Case:
    """Returns the case of a launcher of one generator."""
    devices = ("--trainer.devices", "1", "--trainer.strategy.generator_devices", generator_devices)
    launcher = ("--trainer.strategy.launcher", kind, "--trainer.strategy.launcher.jobs", "1")
    return (*devices, *launcher, *words), named


def scored_elsewhere(kind: str, *named: str, **settings: object) -> Case:
    """Returns the case of a launcher of one scorer."""
    own = [
        word
        for name, value in settings.items()
        for word in (f"--data.reward_launcher.{name}", str(value))
    ]
    return ("--data.reward_launcher", kind, "--data.reward_launcher.jobs", "1", *own), named


def played(kind: str, *named: str, **settings: object) -> Case:
    """Returns the case of one of `tests.environments.broken`."""
    words = [word for name, value in settings.items() for word in (f"--data.{name}", str(value))]
    return ("--data.environment", f"tests.environments.broken.{kind}", *words), named


def tools(functions: str, *named: str, words: tuple[str, ...] = ()) -> Case:
    """Returns the case of an environment with these tools."""
    parser = ("--trainer.strategy.server.tool_parser", "hermes")
    environment = ("--data.environment", "lrl.environments.Tools")
    model = ("--model.model", "{in}/models/tools")
    given = (*model, *parser, *environment, "--data.environment.tools", functions)
    return (*given, *words), named


ADD = '["tests.environments.tool_functions.add"]'

SETTINGS: dict[str, Case] = {
    "no such tool": tools(
        '["tests.environments.tool_functions.ad"]', "tools", "tests.environments.tool_functions.ad"
    ),
    "tools without a parser": tools(
        ADD,
        "strategy.server.tool_parser is null",
        "such as hermes",
        words=("--trainer.strategy.server.tool_parser", "null"),
    ),
    "a template without tools": tools(
        ADD,
        "chat template leaves out the tools of data.environment",
        "Take a model whose chat template knows tools",
        words=("--model.model", "{in}/models/whole"),
    ),
    "tools for plain text": tools(
        ADD, "prompts of", "are plain text", words=("--data.prompts.chat", "false")
    ),
    "tools without a reward": tools(ADD, "rewards is empty", words=("--data.rewards", "[]")),
    "scorers without srun": scored_elsewhere(
        "Slurm", "data.reward_launcher is Slurm", "no srun on the path"
    ),
    "scorers without their cluster": scored_elsewhere(
        "Ray",
        "data.reward_launcher.address is 127.0.0.1:1",
        "ray start --head",
        address="127.0.0.1:1",
    ),
    "a launcher of no environment": (
        ("--data.environment_launcher", "Given", "--data.environment_launcher.jobs", "1"),
        ("data.environment_launcher is Given", "there is no data.environment"),
    ),
    "a launcher without srun": launched(
        ("strategy.launcher is Slurm", "no srun on the path"), kind="Slurm"
    ),
    "a launcher without its cluster": launched(
        ("strategy.launcher.address is 127.0.0.1:1", "ray start --head", "Connection refused"),
        *("--trainer.strategy.launcher.address", "127.0.0.1:1"),
        kind="Ray",
    ),
    "a launcher and devices for generators": launched(
        ("strategy.generator_devices is 1", "set generator_devices to 0"),
        *("--trainer.devices", "2"),
        generator_devices="1",
    ),
    "a launcher and evaluation generators": launched(
        ("strategy.evaluation_generators is 1", "leave strategy.launcher out"),
        *("--trainer.strategy.evaluation_generators", "1"),
    ),
    "a launcher and sides that take turns": launched(
        ("strategy.placement is shared", "leave one out"),
        *("--trainer.strategy.placement", "shared", "--data.max_lag", "0"),
    ),
    "copies that do not divide the ranks": fsdp(
        ("strategy.replicas is 3", "4 trainer ranks", "divisor"), replicas=3
    ),
    "a copy on one rank": fsdp(("strategy.replicas is 4", "lrl.AsyncDDP"), replicas=4),
    "weights away from the GPU, on a CPU": fsdp(
        ("strategy.cpu_offload", "on the CPU already"), cpu_offload=True
    ),
    "a mesh for a sharded policy": fsdp(
        ("strategy.data_parallel_size is 2", "Leave it out"), data_parallel_size=2
    ),
    "groups that do not divide the ranks": fsdp(
        ("strategy.tensor_parallel_size is 3", "4 tr"), tensor_parallel_size=3
    ),
    "one group for all ranks": fsdp(
        ("strategy.tensor_parallel_size is 4", "two or more"), tensor_parallel_size=4
    ),
    "matrices in a format that needs a quantised model": setting(
        "trainer.strategy.server.quantization", "awq", "fp8_per"
    ),
    "speculative decoding on a CPU": (
        (
            "--trainer.strategy.server.extra_args",
            json.dumps({"speculative-config": {"method": "ngram"}}),
        ),
        (
            "strategy.server.extra_args",
            "speculative decoding",
            "CPU",
            "Leave speculative-config out",
        ),
    ),
    "adapters of layers that the model does not have": (
        ("--model.lora", json.dumps({"target_modules": ["c_attn"]})),
        ("model.lora.target_modules", "'c_attn'", "LlamaForCausalLM", "q_proj"),
    ),
    "adapters of divided layers": (
        (*fsdp((), tensor_parallel_size=2)[0], "--model.lora.rank", "4"),
        ("strategy.tensor_parallel_size is 2", "model.lora"),
    ),
    "adapters and a reference that would need some": (
        (
            *("--model.lora.rank", "4"),
            *("--model.reference", "lrl.Reference", "--model.reference.refresh_every_n_steps", "2"),
        ),
        ("model.reference.refresh_every_n_steps is 2", "model.lora"),
    ),
    "a strategy of Lightning's by its word": (
        ("--trainer.strategy", "fsdp"),
        ("trainer.strategy is fsdp, which has no generators", "lrl.AsyncFSDP"),
    ),
    "a negative lag": setting("data.max_lag", -1, "data.max_lag", "at least 0"),
    "a group of one": setting("data.rollouts_per_group", 1, "at least 2"),
    "greedy rollouts": setting("data.temperature", "0.0", "Use 1.0"),
    "a temperature at which vLLM does not sample": setting(
        "data.temperature", "0.005", "would sample at 0.01"
    ),
    "the stop of a turn as one text": played("TextStop", "TextStop.stop is the text '='", "('=',)"),
    "the stop of a turn in many tokens": played("LongStop", "LongStop.stop has 'stop'", "4 tokens"),
    "the stop of a turn in no token": played("EmptyStop", "EmptyStop.stop has ''", "0 tokens"),
    "a turn longer than its episode": played(
        "SaysNothing", "data.max_turn_tokens is 9999", "lower it", max_turn_tokens=9999
    ),
    "a step larger than the data set": setting("data.groups_per_step", 9, "8 prompts", "at most 8"),
    "a replay of nothing": (
        (
            "--data.replay",
            "lrl.Replay",
            "--data.replay.groups_per_step",
            "0",
            "--data.replay.max_lag",
            "2",
        ),
        ("data.replay", "groups_per_step is 0", "null"),
    ),
    "a ranker's model that is not there": (
        (*RANKER, "--data.length_predictor.ranker.model", "no/such_model"),
        ("data.length_predictor.ranker", "no/such_model", "folder in Hugging Face format"),
    ),
    "a ranker on a device that is not there": (
        (
            *RANKER,
            "--data.length_predictor.ranker.model",
            "{in}/models/whole",
            "--data.length_predictor.ranker.device",
            "cuda:99",
        ),
        ("data.length_predictor.ranker.device is 'cuda:99'", "this machine has"),
    ),
    "a critic whose values nobody uses": (
        (
            "--model.critic",
            "lrl.Critic",
            "--model.critic.value_only_steps",
            "0",
            # The opposite of the next case's.
            "--data.advantages",
            "lrl.advantages.GroupMean",
        ),
        ("model.critic is set", "data.advantages GroupMean", "lrl.advantages.GAE"),
    ),
    "advantages of values without a critic": (
        ("--data.advantages", "lrl.advantages.GAE"),
        ("data.advantages GAE needs the values of a critic", "model.critic to lrl.Critic"),
    ),
    "a critic of turns beside advantages of another": (
        (
            *("--model.critic", "lrl.TurnCritic", "--model.critic.value_only_steps", "0"),
            *("--data.advantages", "lrl.advantages.GAE"),
        ),
        ("data.advantages GAE needs the values", "lrl.Critic"),
    ),
    "advantages of turns beside a critic of tokens": critic(
        ("--data.advantages", "lrl.advantages.ArCHer"),
        ("data.advantages ArCHer needs the values", "lrl.TurnCritic"),
    ),
    "a critic beside an objective of the group": critic(
        ("--model.objective", "TBA", "--model.reference", "lrl.Reference"),
        ("model.objective TBA", "data.advantages is GAE"),
    ),
    "equal groups skipped beside a critic": critic(
        ("--data.max_skipped_per_step", "4"),
        ("data.max_skipped_per_step is 4", "GAE", "leave it out"),
    ),
    "a critic that learns alone to the end": critic(
        ("--model.critic.value_only_steps", "50", "--trainer.max_steps", "50"),
        ("model.critic.value_only_steps is 50", "trainer.max_steps 50"),
    ),
    "a critic's model of its own in divided layers": critic(
        (
            *fsdp((), tensor_parallel_size=2)[0],
            *("--model.critic.model", "{in}/models/qwen2"),
        ),
        ("strategy.tensor_parallel_size is 2", "model.critic.model"),
    ),
    "a critic that is not there": critic(
        ("--model.critic.model", "no/such_model"),
        ("model.critic.model='no/such_model'", "folder in Hugging Face format"),
    ),
    "a critic that clips what does not move": critic(
        ("--model.critic.clip", "0.2"),
        ("model.critic.clip is 0.2", "data.replay"),
    ),
    "equal rewards skipped beside a memory of rewards": (
        (
            *("--data.advantages", "lrl.advantages.ReinforcePlusPlus"),
            *("--data.max_skipped_per_step", "2"),
        ),
        ("data.max_skipped_per_step is 2", "ReinforcePlusPlus", "leave it out"),
    ),
    "equal rewards skipped beside a KL in the reward": (
        (
            *("--model.reference", "lrl.Reference", "--model.reference.coefficient", "0.1"),
            *("--model.reference.penalty_in", "reward", "--data.max_skipped_per_step", "2"),
        ),
        ("data.max_skipped_per_step is 2", "model.reference Reference", "leave it out"),
    ),
    "equal rewards skipped beside a teacher": (
        (
            *("--model.reference", "lrl.Teacher", "--model.reference.model", "{in}/models/qwen2"),
            *("--data.max_skipped_per_step", "2"),
        ),
        ("data.max_skipped_per_step is 2", "model.reference Teacher", "leave it out"),
    ),
    "a teacher that is not there": (
        ("--model.reference", "lrl.Teacher", "--model.reference.model", "no/such_model"),
        ("model.reference.model='no/such_model'", "folder in Hugging Face format"),
    ),
    "a teacher whose server is not there": (
        ("--model.reference", "lrl.Teacher", "--model.reference.url", "http://127.0.0.1:9"),
        ("model.reference.url cannot be the run's teacher", "http://127.0.0.1:9/tokenize"),
    ),
    "a reference that is not there": (
        ("--model.reference", "lrl.Reference", "--model.reference.model", "no/such_model"),
        ("model.reference.model='no/such_model'", "folder in Hugging Face format"),
    ),
    "a reference of another architecture that is to follow the policy": (
        (
            *("--model.reference", "lrl.Reference", "--model.reference.model", "{in}/models/qwen2"),
            *("--model.reference.refresh_every_n_steps", "5"),
        ),
        (
            "model.reference.refresh_every_n_steps is 5",
            "models/qwen2",
            "of another architecture",
            "Leave",
        ),
    ),
    "a baseline that the objective cannot use": (
        (
            "--model.objective",
            "lrl.objectives.TBA",
            "--model.reference",
            "lrl.Reference",
            "--data.advantages",
            "lrl.advantages.GRPO",
        ),
        ("model.objective TBA", "data.advantages", "GRPO", "lrl.GroupMean"),
    ),
    "GSPO on branches": (
        (
            *("--model.objective", "GSPO", "--data.environment", "lrl.environments.Agent"),
            *("--data.environment.agent", "tests.environments.agents.adds"),
        ),
        ("model.objective GSPO", "branches", "data.environment", "false"),
    ),
    **{
        f"{name} on responses without their old tokens": (
            (*("--data.stragglers", "mask", "--model.objective", name), *more),
            (f"model.objective {name}", "data.stragglers mask", "wait"),
        )
        for name, more in {
            "TOPR": (),
            "GSPO": (),
            "TIS": ("--model.objective.level", "sequence"),
            "TBA": ("--model.reference", "lrl.Reference"),
        }.items()
    },
    "a negative learning rate": setting("model.lr", "-0.1", "at least 0"),
    "a moment that never decays": (
        ("--model.betas", "[0.9, 1.0]"),
        ("model.betas is (0.9, 1.0)", "below 1"),
    ),
    "a schedule without an end": (
        ("--model.schedule", "cosine", "--trainer.max_steps", "-1"),
        ("model.schedule='cosine'", "trainer.max_steps"),
    ),
    "a rho below one": (
        ("--model.objective", "AIPO", "--model.objective.rho", "0.5"),
        ("rho=0.5", "at least 1"),
    ),
    "an objective without its reference": (
        ("--model.objective", "lrl.objectives.TBA"),
        ("model.objective TBA", "model.reference"),
    ),
    "a reference that costs nothing on average": (
        (
            "--model.reference",
            "lrl.Reference",
            "--model.reference.coefficient",
            "1",
            "--model.reference.estimator",
            "k1",
        ),
        ("model.reference.estimator k1", "k2 or k3"),
    ),
    "an attention that is not installed": setting("model.attention", "flash_attention_2"),
}

WORDS: dict[str, Case] = {
    "gradients averaged at another time": fsdp(
        ("strategy.reduce_gradients", "'each', 'once'"), reduce_gradients="always"
    ),
    "a misspelt key": (("--data.max_lagg", "1"), ("data.max_lagg", "Did you mean data.max_lag?")),
    "a misspelt key of the trainer": (
        ("--trainer.max_step", "1"),
        ("Did you mean trainer.max_steps?",),
    ),
    "a misspelt key of the prompts": (
        ("--data.prompts.sorce", "x"),
        ("Did you mean --data.prompts.source?",),
    ),
    "a value of the prompts that is none": (
        ("--data.prompts.limit", "few"),
        ("data.prompts.limit", "'few' is no value"),
    ),
    "a misspelt key two classes deep": (
        ("--trainer.strategy.server.max_num_seq", "1"),
        ("Did you mean trainer.strategy.server.max_num_seqs?",),
    ),
    "a misspelt key in a config": (
        ("--config", "{in}/misspelt.yaml"),
        ("data.stragler: there is no such setting", "Did you mean data.stragglers?"),
    ),
    "a key of a class inside": (
        ("--trainer.strategy.max_num_seqs", "1"),
        ("Did you mean trainer.strategy.server.max_num_seqs?",),
    ),
    "a key without its group": (("--max_lag", "1"), ("Did you mean data.max_lag?",)),
    "a misspelt group": (("--modle.lr", "1"), ("Did you mean model.lr?",)),
    "a word that belongs to no key": (("quickstart",), ("Did you mean --config quickstart?",)),
    "a setting without its dashes": (("data.max_lag=2",), ("Did you mean data.max_lag?",)),
    "a wrong type": (("--data.max_lag", "soon"), ("data.max_lag", "int", "soon")),
    "a choice that is not there": (
        ("--data.stragglers", "wiat"),
        ("data.stragglers", "'wait', 'mask'", "wiat"),
    ),
    "neither a choice nor a number": (
        ("--model.normalise_by", "mean"),
        ("model.normalise_by", "'token', 'sequence'", "or expected int"),
    ),
    "flags that are no mapping": (
        ("--trainer.strategy.server.extra_args", "5"),
        ("trainer.strategy.server.extra_args", "dict"),
    ),
    "a setting of a callback that is no number": (
        ("--trainer.callbacks+", "Health", "--trainer.callbacks.steps", "few"),
        ("trainer.callbacks.steps", "int", "few"),
    ),
    "a list that is too short": (("--model.betas", "[0.9]"), ("model.betas", "2 elements")),
    "a list on the command line that is cut": (
        ("--model.betas", "[0.9, 0.95"),
        ("model.betas", "[0.9, 0.95"),
    ),
    "null for what has no default": (("--model.model", "null"), ("are required: model",)),
    "null for a choice": (("--data.stragglers", "null"), ("data.stragglers", "wait, mask")),
    "a launcher without its jobs": (
        ("--trainer.strategy.launcher", "Ray"),
        ("trainer.strategy.launcher", "are required: jobs"),
    ),
    "a callback without its data": (
        ("--trainer.callbacks+", "Evaluation"),
        ("trainer.callbacks", "are required: prompts"),
    ),
    "an objective that is not there": (
        ("--model.objective", "GPSO"),
        ("model.objective", "Did you mean GSPO?"),
    ),
    "a callback that is not there": (
        ("--trainer.callbacks+", "WeightSink"),
        ("trainer.callbacks", "Did you mean WeightSync?"),
    ),
    "a module that is not there": (
        ("--trainer.callbacks+", "lrl.callbaks.WeightSync"),
        ("trainer.callbacks", "Did you mean lrl.callbacks?"),
    ),
    "a strategy that is not there": (
        ("--trainer.strategy", "lrl.AsyncSingleDevic"),
        ("trainer.strategy", "Did you mean AsyncSingleDevice?"),
    ),
    "a strategy in lower case": (("--trainer.strategy", "asyncddp"), ("Did you mean AsyncDDP?",)),
    "a launcher in lower case": (("--trainer.strategy.launcher", "ray"), ("Did you mean Ray?",)),
    "a logger that is not there": (
        ("--trainer.logger", "TensorBordLogger"),
        ("trainer.logger", "Did you mean TensorBoardLogger?"),
    ),
    "a class whose module is broken": (
        ("--model", "broken_module.Policy"),
        ("model: broken_module cannot be imported: SyntaxError", "broken_module.py, line 2"),
    ),
    "no such environment": (
        ("--data.environment", "Calculatr"),
        ("data.environment", "Calculatr"),
    ),
    "a reward for an environment": (
        ("--data.environment", "lrl.rewards.ExactMatch"),
        ("data.environment", "subclass of Environment"),
    ),
    "an environment without a reply": played("NoReply", "data.environment", "abstract"),
    "an environment that cannot be made": played("Unmade", "there is no level1.txt"),
    "an environment that cannot be sent": played(
        "Lambda", "data.environment is Lambda", "top level of a module"
    ),
    "a config that is not there": (
        ("--config", "no_such.yaml"),
        ("no_such.yaml", "Shipped are agent, calculator, gsm8k"),
    ),
    "a misspelt recipe": (
        ("--config", "quickstrat"),
        ("--config quickstrat", "Did you mean quickstart?"),
    ),
    "a config that is no YAML": (("--config", "{in}/broken.yaml"), ("broken.yaml: line 3",)),
    "a group's own config that is no YAML": (
        ("--config", "{in}/trainer-of-broken.yaml"),
        ("trainer", "broken.yaml", "line 3"),
    ),
    "a config of a config that is not there": (
        ("--config", "{in}/trainer-of-gone.yaml"),
        ("trainer: Unable to load config", "gone.yaml"),
    ),
    "an interpolation that leads nowhere": (
        ("--trainer.max_steps", "${data.init_args.max_lagg}"),
        ("trainer.max_steps", "data.init_args.max_lagg", "not found"),
    ),
    "an objective of another library": (
        ("--model.objective", "grpo"),
        ("model.objective", "--model.objective PPO --data.advantages GRPO"),
    ),
    "that objective with a module": (
        ("--model.objective", "lrl.objectives.DAPO"),
        ("model.objective PPO", "0.28"),
    ),
    "a setting of another library": (
        ("--data.num_generations", "8"),
        ("Here it is data.rollouts_per_group.",),
    ),
    "a setting of another library that is not here": (
        ("--data.top_p", "0.9"),
        ("data.top_p", "There is none here"),
    ),
}
"""What the command line cannot read."""

TRAINER: dict[str, Case] = {
    "no device left to train": setting("trainer.devices", 1, "generator_devices", "at least 2"),
    "a GPU that is not there": (("--trainer.accelerator", "gpu"), ("gpu",)),
    "a strategy without generators": (
        ("--trainer.strategy", "auto", "--trainer.devices", "1"),
        ("lrl.AsyncSingleDevice",),
    ),
    "a negative number of generators": (
        ("--trainer.strategy.generator_devices", "-1", "--trainer.devices", "1"),
        ("strategy.generator_devices is -1", "0 (shared)"),
    ),
    "every generator kept for evaluation": setting(
        "trainer.strategy.evaluation_generators", 1, "none is left"
    ),
    "a transport without its hardware": setting(
        "trainer.strategy.weight_transfer", "nccl", "shared_memory"
    ),
    "a transport that is not there": setting(
        "trainer.strategy.weight_transfer", "pigeon", "shared_memory"
    ),
    "turns and answers written ahead": setting(
        "trainer.strategy.placement", "shared", "Set data.max_lag to 0"
    ),
    "a trainer flag for the module": setting(
        "trainer.gradient_clip_val", "1.0", "model.max_grad_norm"
    ),
    "micro-batches by a trainer flag": setting(
        "trainer.accumulate_grad_batches", 2, "data.micro_batch_tokens"
    ),
    "half-precision weights": setting("trainer.precision", "16-true", "model.dtype"),
    "a step in bfloat16": setting(
        "trainer.precision", "bf16-true", "bf16-mixed", "model.dtype=bfloat16"
    ),
    "two syncs": (only(SYNC, SYNC), ("trainer.callbacks", "keep one")),
    "syncs too rare for the lag": (
        (
            "--trainer.callbacks",
            json.dumps([{"class_path": SYNC, "init_args": {"every_n_steps": 4}}]),
        ),
        ("WeightSync.every_n_steps is 4", "data.max_lag is 1", "at least 3"),
    ),
    "an evaluation at a temperature at which vLLM does not sample": evaluation(
        {"temperature": 0.005}, "Evaluation.temperature is 0.005", "0.01"
    ),
    "an evaluation of equal samples": evaluation(
        {"samples": 4}, "Evaluation.samples is 4", "temperature 0"
    ),
    "an evaluation of one group in half a place": evaluation(
        {"samples": 4, "temperature": 1.0, "concurrency": 2},
        "Evaluation.concurrency is 2",
        "samples 4",
    ),
    "an evaluation by a column that is not there": evaluation(
        {"by": "[level]"}, "Evaluation.by", "level", "answer"
    ),
    "an evaluation of a file that is not there": callback(
        "Evaluation", {"prompts": "{tmp}/none.jsonl"}, "Evaluation.prompts", "none.jsonl"
    ),
    "a checkpoint by an evaluation that is not there": (
        monitor("ModelCheckpoint", "eval/rows/accuracy"),
        ("ModelCheckpoint.monitor is 'eval/rows/accuracy'", "no lrl.callbacks.Evaluation"),
    ),
    "a checkpoint by an evaluation of another name": (
        (*evaluation({})[0], *monitor("ModelCheckpoint", "eval/row/accuracy")),
        ("ModelCheckpoint.monitor is 'eval/row/accuracy'", "Did you mean eval/rows/accuracy?"),
    ),
    "an end by a number that no evaluation has": (
        (*evaluation({})[0], *monitor("EarlyStopping", "eval/rows/pass@2")),
        ("EarlyStopping.monitor is 'eval/rows/pass@2'", "eval/rows/accuracy"),
    ),
    "two evaluations of one name": (
        (*evaluation({})[0], *evaluation({})[0]),
        ("lrl.callbacks.Evaluation", "'rows'", "name"),
    ),
    "an export over the model itself": callback(
        "Export", {"folder": "{in}/models/whole"}, "Export.folder", "models/whole"
    ),
}

SERVERS: dict[str, Case] = {
    "more than all of a GPU": setting(
        "trainer.strategy.server.gpu_memory_utilization", "1.5", "at most 1"
    ),
    "more memory than there is": (
        ("--trainer.strategy.server.kv_cache_gib", "100000.0"),
        ("kv_cache_gib", "Memory", "GiB are needed"),
    ),
    "a context shorter than prompt and answer": setting(
        "trainer.strategy.server.max_model_len", 95, "96"
    ),
    "a setting of its own among the flags": (
        ("--trainer.strategy.server.extra_args", '{"max-num-seqs": 8}'),
        ("extra_args", "max-num-seqs", "set it there"),
    ),
    "a fixed port": extra("port", 8000),
    "a key that guards half of the routes": extra("api_key", "secret"),
    "other log-probs": extra("logprobs_mode", "raw_logits"),
    "the model's own sampling": extra("generation_config", "auto"),
    "top-p in the server": extra("top_p", 0.9),
    "a penalty in the server": extra("repetition_penalty", 1.05),
    "a logits processor": extra("logits_processors", ["mine:Processor"]),
    "code from the hub": extra("trust_remote_code", True),
    "another config in the server": extra("hf_overrides", {"rope_theta": 1.0}),
}
