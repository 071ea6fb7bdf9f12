"""Words that make a healthy run wrong, each beside the words that the error must have.

`{in}` is the folder of `tests.preflight.broken_inputs`, `{tmp}` an empty one.
"""

from __future__ import annotations

import json

Words = tuple[str, ...]
Case = tuple[Words, Words]


def setting(name: str, value: object, *named: str) -> Case:
    """Returns the case of one wrong setting; the error has the setting, the value and the other
    words."""
    return (f"--{name}", str(value)), (name.rpartition(".")[2], str(value), *named)


def model(name: str, *named: str) -> Case:
    return ("--model.model", f"{{in}}/models/{name}"), ("model", f"models/{name}", *named)


def source(name: str, *named: str) -> Case:
    return ("--data.prompts.source", f"{{in}}/data/{name}"), (name, *named)


def extra(flag: str, value: object) -> Case:
    return ("--trainer.strategy.server.extra_args", json.dumps({flag: value})), (
        "extra_args",
        flag,
        "Leave it out",
    )


def callback(name: str, settings: dict[str, object], *named: str) -> Case:
    words = [
        word
        for key, value in settings.items()
        for word in (f"--trainer.callbacks.{key}", str(value))
    ]
    return ("--trainer.callbacks+", f"lrl.callbacks.{name}", *words), named


def monitor(kind: str, metric: str) -> Words:
    return "--trainer.callbacks+", kind, "--trainer.callbacks.monitor", metric


def evaluation(settings: dict[str, object], *named: str) -> Case:
    prompts = {
        "class_path": "lrl.Prompts",
        "init_args": {"source": "{in}/data/rows.jsonl", "name": "rows"},
    }
    return callback("Evaluation", {"prompts": json.dumps(prompts)} | settings, *named)


def only(*callbacks: str) -> Words:
    return "--trainer.callbacks", json.dumps([{"class_path": name} for name in callbacks])
