"""Data sets, rewards, model folders and checkpoints that a user may have; how a case is written:
`tests.preflight.bad_words`."""

from __future__ import annotations

import json

from tests.preflight.bad_words import Case, model, setting, source

REWARD = "--data.rewards"

DATA: dict[str, Case] = {
    "a data set that is not there": source("none.jsonl", "No such file"),
    "a line that is cut": source("broken.jsonl", "line 2"),
    "a column that is not there": (
        source("questions.jsonl")[0],
        ("prompt", "question", "prompt_column"),
    ),
    "a column that the reward reads": (source("no-answers.jsonl")[0], ("'answer'", "exact_match")),
    "a reference that is not one number": (
        (*source("times.jsonl")[0], REWARD, "GSM8K"),
        (
            "data.prompts",
            "'gsm8k'",
            "row 8 of times",
            "'12:30'",
            "exactly one",
        ),
    ),
    "a reference that is missing": (
        source("null-answer.jsonl")[0],
        ("data.prompts", "'exact_match'", "row 8 of null-answer", "None"),
    ),
    "a column that a function reads": (
        (
            REWARD,
            "[lrl.quickstart.task:correct]",
            "--data.prompts.source",
            "{in}/data/no-answers.jsonl",
        ),
        ("'answer'", "correct"),
    ),
    "prompts that are too long": setting(
        "data.max_prompt_tokens",
        3,
        "data.prompts: ",
        "data.max_prompt_tokens=3",
        "too_long=skip",
    ),
    "prompts that are all skipped": (
        (*source("long.jsonl")[0], "--data.prompts.too_long", "skip"),
        ("8 prompts", "max_prompt_tokens=64", "Raise"),
    ),
    "prompts of which too few are left": (
        (*source("mostly-long.jsonl")[0], "--data.prompts.too_long", "skip"),
        ("data.groups_per_step is 4", "3 prompts", "data.max_prompt_tokens"),
    ),
    "a template for other columns": (
        ("--data.prompts.template", "{question}"),
        ("`template` names question", "prompt, answer"),
    ),
    "a source that cannot be imported": (
        ("--data.prompts.source", "no_such_module:rows"),
        ("data.prompts", "'no_such_module'", "module:function"),
    ),
    "chats without a chat template": (
        (*source("chats.jsonl")[0], *model("no-template")[0]),
        ("Row 0", "chat template"),
    ),
    "a chat template that refuses the messages": (
        (*source("system.jsonl")[0], *model("strict-template")[0]),
        ("no system here", "chat template"),
    ),
    "no reward": ((REWARD, "[]"), ("rewards is empty",)),
    "a reward that cannot be imported": ((REWARD, "[no_such_module:reward]"), ("no_such_module",)),
    "one reward that cannot be imported": (
        (REWARD, "rr:f"),
        ("'rr:f'", "no module 'rr'", "file.py:function"),
    ),
    "a reward of a file that is not there": ((REWARD, "no_such.py:f"), ("no file 'no_such.py'",)),
    "a file of rewards without a function": (
        (REWARD, "{in}/judging.py"),
        ("judging.py", "no function in it"),
    ),
    "a data set in the place of its group": (
        ("--data", "{in}/data/rows.jsonl"),
        ("data", "rows.jsonl"),
    ),
    "a misspelt reward": ((REWARD, "lrl.rewards.GSM9K"), ("Did you mean GSM8K?",)),
    "a prompt that no tokenizer encodes": (
        source("surrogate.jsonl")[0],
        ("Row 3 of surrogate, column 'prompt'", "character 2", "half of a surrogate pair"),
    ),
    "a reward that takes no columns": ((REWARD, "[os.path:join]"), ("join", "**columns")),
    "a reward of TRL": (
        (REWARD, "trl_rewards:brief"),
        (
            "brief takes `completions`",
            "def brief_of_one(prompt, response, **columns)",
            "completions=[response]",
        ),
    ),
    "two rewards of one name": (
        (REWARD, json.dumps([{"class_path": "lrl.rewards.GSM8K"}] * 2)),
        ("more than one named", "gsm8k"),
    ),
}

MODELS: dict[str, Case] = {
    "a model that is not there": setting("model.model", "no/such-model"),
    "a folder in the place of its group": (
        ("--model", "{in}/models/whole"),
        ("model", "models/whole"),
    ),
    "a folder that is not there": setting(
        "model.model", "./nope", "model.model='./nope': there is no such folder"
    ),
    "a model that cannot be imported": setting("model.model", "no_such_module:make"),
    "a folder without a config": model("no-config", "config"),
    "a config that is no JSON": model("broken-config", "JSON"),
    "a config of no type": model("no-type", "model_type"),
    "a config of an unknown type": model("unknown-type", "oddball"),
    "a model with code of its own": model("own-code", "code of its own"),
    "a tokenizer with code of its own": model("tokenizer-code", "code of its own"),
    "a config that contradicts itself": model("odd-heads", "attention heads"),
    "a word where a number belongs": model("word-for-number", "hidden_size"),
    "weights of another size": model("other-size", "config.json", "embed_tokens"),
    "weights of another vocabulary": model("other-vocabulary", "embed_tokens", "config.json"),
    "weights for fewer layers": model("more-layers", "lacks weights", "layers.2"),
    "positions that vLLM takes for those of long texts": model(
        "longrope", "longrope", "beyond 64 tokens", "may have 96"
    ),
    "positions that depend on the length of the text": model(
        "dynamic", "dynamic", "beyond 64 tokens"
    ),
    "an attention that leaves out the model's cap": model(
        "capped", "attn_logit_softcapping is 50", "sdpa", "model.attention", "eager"
    ),
    "an attention that leaves out the reference's cap": (
        ("--model.reference", "lrl.Reference", "--model.reference.model", "{in}/models/capped"),
        ("model.reference.", "attn_logit_softcapping is 50"),
    ),
    "settings of generation that no one opens": model("odd-generation", "num_return_sequences"),
    "no weights": model("no-weights", "has no weights"),
    "a file that is cut": model("cut-weights", "model.safetensors cannot be read"),
    "a shard that is missing": model("no-shard", "model-00002-of-00002.safetensors"),
    "an index that is none": model("broken-index", "model.safetensors.index.json"),
    "no tokenizer": model("no-tokenizer", "AutoTokenizer cannot open it"),
    "a tokenizer that is no JSON": model("broken-tokenizer", "AutoTokenizer"),
    "a tokenizer with more tokens than the model": model("larger-tokenizer", "309", "259 rows"),
    "no language model": model("not-a-language-model", "AutoModelForCausalLM"),
    "a quantised model": model("quantised", "quant_method mxfp4", "bfloat16 copy"),
    "a quantised reference": (
        ("--model.reference", "lrl.Reference", "--model.reference.model", "{in}/models/quantised"),
        ("model.reference.model=", "quant_method mxfp4", "bfloat16 copy"),
    ),
    "a reference without weights": (
        ("--model.reference", "lrl.Reference", "--model.reference.model", "{in}/models/no-weights"),
        ("model.reference.model", "has no weights"),
    ),
}

RESUMES: dict[str, Case] = {
    "a checkpoint that is not there": (
        ("--ckpt_path", "{tmp}/none.ckpt"),
        ("--ckpt_path", "no checkpoint"),
    ),
    "a last checkpoint where there is none": (
        ("--ckpt_path", "last"),
        ("ckpt_path is 'last'", "no checkpoint in"),
    ),
    "a best checkpoint of a run to come": (
        ("--ckpt_path", "best"),
        ("ckpt_path is 'best'", "'last'"),
    ),
    "a checkpoint that is text": (
        ("--ckpt_path", "{in}/checkpoints/text.ckpt"),
        ("--ckpt_path", "text.ckpt", "read"),
    ),
    "a folder that is no checkpoint": (
        ("--ckpt_path", "{in}/checkpoints/empty"),
        ("--ckpt_path", "no checkpoint"),
    ),
    "a checkpoint in parts for a whole policy": (
        ("--ckpt_path", "{in}/checkpoints/parts"),
        ("AsyncFSDP", "lrl export"),
    ),
    "a checkpoint without weights": (
        ("--ckpt_path", "{in}/checkpoints/no-weights.ckpt"),
        ("no-weights", "state_dict"),
    ),
    "a checkpoint of another model": (
        ("--ckpt_path", "{in}/checkpoints/other-model.ckpt"),
        ("other-model.ckpt", "another model than model.model"),
    ),
    "a checkpoint of other groups": (
        ("--ckpt_path", "{in}/checkpoints/other-groups.ckpt"),
        ("data.groups_per_step 4", "resume with"),
    ),
    "a checkpoint of another order of the prompts": (
        ("--ckpt_path", "{in}/checkpoints/other-order.ckpt"),
        ("another order of them", "data.prompts has changed", "seed"),
    ),
    "a checkpoint of another kind of run": (
        ("--ckpt_path", "{in}/checkpoints/other-module.ckpt"),
        ("other-module.ckpt", "RolloutDataModule"),
    ),
}
