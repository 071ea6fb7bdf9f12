"""Data sets, model folders and checkpoints with one fault each, made once for all tests of bad
input."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml

from lrl.rollouts.ledger import Ledger, Pacing
from tests.taught_policy import TEMPLATE
from tests.tiny_policies import SERVED, byte_tokenizer, save_tiny, tiny_llama

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]


def make(folder: Path) -> Path:
    """Everything that the cases name, under one folder: `run.yaml`, `data`, `models`,
    `checkpoints`."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "run.yaml").write_text(yaml.safe_dump(run(folder)))
    (folder / "data").mkdir()
    for name, rows in DATA.items():
        (folder / "data" / name).write_text(as_lines(rows))
    (folder / "data/broken.jsonl").write_text('{"prompt": "1"}\n{"prompt": \n')
    make_models(folder / "models")
    make_checkpoints(folder / "checkpoints", folder / "models/whole")
    return folder


FILES = {
    "broken.yaml": "data:\n  init_args: [\n",
    "broken_module.py": "class Policy:\n    pass pass\n",
    "trl_rewards.py": "def brief(completions, answer, **kwargs):\n    return [0.0 for _ in completions]\n",
}


def as_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def of(kind: str, **settings: Any) -> dict[str, Any]:
    return {"class_path": f"lrl.{kind}", "init_args": settings}


def run(folder: Path) -> dict[str, Any]:
    """A small run that is right in everything."""
    data = of(
        "RolloutDataModule",
        prompts=of("Prompts", source=str(folder / "data/rows.jsonl")),
        rewards=[of("rewards.ExactMatch")],
        groups_per_step=4,
        max_prompt_tokens=64,
        max_response_tokens=32,
    )
    trainer = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": of("AsyncSingleDevice", generator_devices=1),
        "max_steps": 4,
        "max_epochs": -1,
        "logger": False,
        "enable_model_summary": False,
        "callbacks": [of("callbacks.WeightSync")],
    }
    model = of("PolicyModule", model=str(folder / "models/whole"))
    return {"model": model, "data": data, "trainer": trainer}


CHAT = [{"role": "user", "content": "2+2="}]
SYSTEM = {"role": "system", "content": "Be brief."}
TIMES = [{"prompt": f"{n} minutes past 12?", "answer": f"12:{n}"} for n in (30, 45)]
LONG = {"prompt": "1+" * 200 + "1=", "answer": "201"}
DATA: dict[str, list[Any]] = {
    "rows.jsonl": ROWS,
    "no-answers.jsonl": [{"prompt": row["prompt"]} for row in ROWS],
    "times.jsonl": [*ROWS, *TIMES],
    "chats.jsonl": [{"prompt": CHAT, "answer": "4"}] * 4,
    "system.jsonl": [{"prompt": [SYSTEM, *CHAT], "answer": "4"}] * 4,
    "mostly-long.jsonl": [*ROWS[:3], *[LONG] * 5],
    "twins.jsonl": ROWS + ROWS,
    "surrogate.jsonl": [*ROWS[:3], {"prompt": "1+\ud83d", "answer": "1"}, *ROWS[3:]],
}

CONFIG, CHATS = "config.json", "chat_template.jinja"
MORE_TOKENS = [f"<{n}>" for n in range(50)]
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS}
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)
CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
SAMPLING = {"do_sample": True, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
MODELS: dict[str, tuple[str, Any]] = {
    "own-code": (CONFIG, {"model_type": "oddball", "auto_map": CODE}),
    "other-size": (CONFIG, {"hidden_size": 32, "head_dim": 16}),
    "more-layers": (CONFIG, {"num_hidden_layers": 3}),
    "quantised": (CONFIG, {"quantization_config": {"quant_method": "mxfp4"}}),
    # Positions that change beyond 64 tokens; the run of `run` has 96.
    "longrope": (
        CONFIG,
        {"rope_parameters": LONGROPE | {"factor": 4.0}, "max_position_embeddings": 256},
    ),
    "dynamic": (
        CONFIG,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
    ),
    "larger-tokenizer": (
        "tokenizer.json",
        {"model": {"vocab": {token: 259 + n for n, token in enumerate(MORE_TOKENS)}}},
    ),
    "tools": (CHATS, TEMPLATE),
    "strict-template": (CHATS, STRICT),
    # Right all the same:
    "sampling": ("generation_config.json", SAMPLING),
}
"""Copies of `whole` with another text in a file, or with other values in one of JSON."""


def make_models(folder: Path) -> None:
    whole = tiny_llama(folder / "whole")
    save_tiny("qwen2", folder / "qwen2", **SERVED, tie_word_embeddings=True)
    for name in (*MODELS, "cut-weights", "added-tokens", "capped", "no-template"):
        shutil.copytree(whole, folder / name)
    for name, (file, new) in MODELS.items():
        path = folder / name / file
        changed = (
            new if isinstance(new, str) else json.dumps(merged(json.loads(path.read_text()), new))
        )
        path.write_text(changed)
    os.truncate(folder / "cut-weights/model.safetensors", 9000)
    (folder / "no-template" / CHATS).unlink()
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(MORE_TOKENS)
    tokenizer.save_pretrained(folder / "added-tokens")
    # A family whose attention has a cap; sdpa, which it has without a setting, leaves that out.
    save_tiny("gemma2", folder / "capped", **SERVED, attn_logit_softcapping=50.0)


def merged(old: Any, new: Any) -> Any:
    """The values of JSON with the new ones, also within values."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {name: merged(old.get(name), value) for name, value in new.items()}


def make_checkpoints(folder: Path, model: Path) -> None:
    """What Lightning would have saved after one step, right and wrong."""
    from lrl.preflight.model import shape_of

    shapes = shape_of(str(model), None).trained
    weights = {f"network.{name}": torch.zeros(shape) for name, shape in shapes.items()}
    smaller = {name: one[..., :32] if "norm" in name else one for name, one in weights.items()}

    def data(groups_per_step: int = 4, **more: str) -> dict[str, Any]:
        pacing = Pacing(prompts_per_epoch=8, groups_per_step=groups_per_step, max_lag=1)
        ledger = Ledger(pacing).state_dict(0) | {"steps_done": 1, "done_through": groups_per_step}
        return {"RolloutDataModule": {"advantages": {}, "ledger": ledger | more}}

    other = {"pytorch-lightning_version": "2.6.6", "state_dict": weights, "global_step": 1}
    whole = other | data()
    checkpoints = {
        "whole.ckpt": whole,
        "other-model.ckpt": whole | {"state_dict": smaller},
        "other-groups.ckpt": whole | data(groups_per_step=2),
        "other-order.ckpt": whole | data(prompts="of another seed"),
        "other-module.ckpt": other,
        "parts/meta.pt": {name: value for name, value in whole.items() if name != "state_dict"},
    }
    dcp.save({"state_dict": weights}, checkpoint_id=folder / "parts", no_dist=True)
    for name, checkpoint in checkpoints.items():
        torch.save(checkpoint, folder / name)
    (folder / "text.ckpt").write_text("no checkpoint")
