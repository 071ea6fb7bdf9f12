"""Words that make a healthy run wrong, each beside the words that the error must have.

`{in}` is the folder of `tests.preflight.broken_inputs`, `{tmp}` an empty one.
"""

from __future__ import annotations

import json

Words = tuple[str, ...]
Case = tuple[Words, Words]
TOGETHER = 8
"""Cases of one run at most: an error names as many faults."""


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


def runs_of(cases: dict[str, Words]) -> list[list[str]]:
    """Divides cases among runs: of one run, no case changes a setting of another one."""
    runs: list[list[str]] = []
    for name, words in cases.items():
        fitting = (
            run
            for run in runs
            if len(run) < TOGETHER
            and not any(share_a_setting(words, cases[other]) for other in run)
        )
        if (run := next(fitting, None)) is None:
            runs.append([name])
        else:
            run.append(name)
    return runs


def share_a_setting(one: Words, other: Words) -> bool:
    """Whether both change the same setting, or one a setting of an object that the other makes; a
    file may change any."""
    ours, others = (
        [f"{word.rstrip('+')}." for word in words if word.startswith("--")]
        for words in (one, other)
    )
    return "--config." in ours + others or any(
        a.startswith(b) or b.startswith(a) for a in ours for b in others
    )
