"""Data sets, model folders and checkpoints with one fault each, made once for all tests of bad
input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from transformers import Gemma2Config, Gemma2ForCausalLM

from lrl.rollouts.ledger import Ledger, Pacing
from tests.taught_policy import TEMPLATE
from tests.tiny_policies import byte_tokenizer, sizes, tiny_llama, tiny_qwen2

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]
Change = Callable[[Path], Any]


def make(folder: Path) -> Path:
    """Everything that the cases name, under one folder: `run.yaml`, `data`, `models`,
    `checkpoints`."""
    model = tiny_llama(folder / "models/whole")
    tiny_qwen2(folder / "models/qwen2")
    for name, break_it in MODELS.items():
        copy = shutil.copytree(model, folder / "models" / name)
        break_it(copy)
    (folder / "data").mkdir()
    for name, content in DATA.items():
        (folder / "data" / name).write_text(
            content if isinstance(content, str) else as_lines(content)
        )
    (folder / "checkpoints/parts").mkdir(parents=True)
    whole = checkpoints(model)["whole"]
    dcp.save(
        {"state_dict": whole.pop("state_dict")},
        checkpoint_id=folder / "checkpoints/parts",
        no_dist=True,
    )
    torch.save(whole, folder / "checkpoints/parts/meta.pt")
    for name, checkpoint in checkpoints(model).items():
        torch.save(checkpoint, folder / f"checkpoints/{name}.ckpt")
    (folder / "checkpoints/text.ckpt").write_text("no checkpoint")
    (folder / "broken.yaml").write_text("data:\n  init_args: [\n")
    (folder / "broken_module.py").write_text("class Policy:\n    pass pass\n")
    (folder / "trl_rewards.py").write_text(
        "def brief(completions, answer, **kwargs):\n    return [0.0 for _ in completions]\n"
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(run(folder)))
    return folder


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


def config(**values: Any) -> Change:
    """A change of config.json; None takes a name out."""
    return in_json("config.json", **values)


def in_json(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(
            json.dumps({key: value for key, value in content.items() if value is not None})
        )

    return change


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:9000])


def with_a_larger_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {f"<{n}>": 259 + n for n in range(50)}
    file.write_text(json.dumps(content))


def with_added_tokens(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(50)])
    tokenizer.save_pretrained(folder)


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def with_tools(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def with_a_strict_template(folder: Path) -> None:
    rule = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') "
        "}}{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(rule + "{{ m.content }}{% endfor %}")


def as_gemma2(folder: Path) -> None:
    """A family whose attention has a cap; sdpa, which it has without a setting, leaves that out."""
    config = Gemma2Config(**sizes(), head_dim=32, attn_logit_softcapping=50.0)
    Gemma2ForCausalLM(config).save_pretrained(folder)


def rotary(kind: str, **parameters: Any) -> Change:
    """Positions that change beyond 64 tokens; the run of `run` has 96."""
    return config(
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0} | parameters,
        max_position_embeddings=64 if kind == "dynamic" else 256,
    )


FACTORS = {
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 64,
}
CODE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
MODELS: dict[str, Change] = {
    "own-code": config(model_type="oddball", auto_map=CODE),
    "other-size": config(hidden_size=32, head_dim=16),
    "more-layers": config(num_hidden_layers=3),
    "cut-weights": cut,
    "larger-tokenizer": with_a_larger_tokenizer,
    "added-tokens": with_added_tokens,
    "longrope": rotary("longrope", **FACTORS),
    "dynamic": rotary("dynamic"),
    "capped": as_gemma2,
    "quantised": config(quantization_config={"quant_method": "mxfp4"}),
    "tools": with_tools,
    "no-template": without_template,
    "strict-template": with_a_strict_template,
    # Right all the same:
    "sampling": in_json(
        "generation_config.json", do_sample=True, top_p=0.8, top_k=20, repetition_penalty=1.05
    ),
}

CHAT = [{"role": "user", "content": "2+2="}]
DATA: dict[str, list[Any] | str] = {
    "rows.jsonl": ROWS,
    "broken.jsonl": '{"prompt": "1"}\n{"prompt": \n',
    "no-answers.jsonl": [{"prompt": row["prompt"]} for row in ROWS],
    "times.jsonl": [
        *ROWS,
        *({"prompt": f"{n} minutes past 12?", "answer": f"12:{n}"} for n in (30, 45)),
    ],
    "chats.jsonl": [{"prompt": CHAT, "answer": "4"}] * 4,
    "system.jsonl": [{"prompt": [{"role": "system", "content": "Be brief."}, *CHAT], "answer": "4"}]
    * 4,
    "mostly-long.jsonl": [
        *ROWS[:3],
        *({"prompt": "1+" * 200 + "1=", "answer": "201"} for _ in range(5)),
    ],
    "twins.jsonl": ROWS + ROWS,
    "surrogate.jsonl": [*ROWS[:3], {"prompt": "1+\ud83d", "answer": "1"}, *ROWS[3:]],
}


def checkpoints(model: Path) -> dict[str, dict[str, Any]]:
    """What Lightning would have saved after one step, right and wrong."""
    from lrl.preflight.model import shape_of

    sizes = shape_of(str(model), None).trained
    weights = {f"network.{name}": torch.zeros(size) for name, size in sizes.items()}
    ledgers = {}
    for groups in (4, 2):
        pacing = Pacing(prompts_per_epoch=8, groups_per_step=groups, max_lag=1)
        ledgers[groups] = Ledger(pacing).state_dict(0) | {"steps_done": 1, "done_through": groups}
    whole = {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": weights,
        "global_step": 1,
        "RolloutDataModule": {"advantages": {}, "ledger": ledgers[4]},
    }
    smaller = {
        name: tensor[..., :32] if "norm" in name else tensor for name, tensor in weights.items()
    }
    return {
        "whole": whole,
        "other-model": whole | {"state_dict": smaller},
        "other-groups": whole | {"RolloutDataModule": {"advantages": {}, "ledger": ledgers[2]}},
        "other-order": whole
        | {"RolloutDataModule": {"ledger": ledgers[4] | {"prompts": "of another seed"}}},
        "other-module": {"state_dict": weights, "global_step": 1},
    }
