"""What a typed value becomes: texts stay as they are, files are named and not read, short forms
become classes.

Covers lrl/cli/parsing.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Say

OWN = {
    "model": {"model": "policy"},
    "data": {"prompts": "problems.csv", "rewards": "judging.py:right"},
}
Config = Callable[..., Callable[[str], Any]]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> Config:
    """Gives the settings that a run with these words would use, by their path in the config."""
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN))
    (tmp_path / "problems.csv").write_text("prompt,answer\n2+2=,4\n")
    reward = "def right(prompt, response, **columns):\n    return 1.0\n"
    (tmp_path / "judging.py").write_text(reward)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "judging", raising=False)

    def config(*words: str, base: dict[str, Any] | None = None) -> Callable[[str], Any]:
        given = ["--config", "own.yaml"]
        if base is not None:
            (tmp_path / "second.yaml").write_text(yaml.safe_dump(base))
            given += ["--config", "second.yaml"]
        status, printed, error = say("fit", *given, *words, "--print_config")
        assert status == 0, error
        settings = yaml.safe_load(printed)

        def at(path: str) -> Any:
            steps = (int(name) if name.lstrip("-").isdigit() else name for name in path.split("."))
            return reduce(getitem, steps, settings)

        return at

    return config


PROMPTS = "data.init_args.prompts"
STRATEGY = "trainer.strategy"
SERVER = f"{STRATEGY}.server"
HELD_OUT = ("--trainer.callbacks", "lrl.callbacks.Evaluation", "--trainer.callbacks.prompts")
TEXTS = {
    "template": "Note: {prompt}",
    "system_prompt": "# Be brief",
    "name": "## a\n# b",
    "subset": "- x",
    "split": "[x]",
    "prompt_column": "7",
}


def test_a_text_stays_as_it_was_typed(config: Config) -> None:
    words = [word for name, text in TEXTS.items() for word in (f"--data.prompts.{name}", text)]
    base = {"data": {"init_args": {"prompts": {"init_args": TEXTS}}}}
    for at in (config(*words), config(base=base)):
        found = at(f"{PROMPTS}.init_args")
        assert {name: found[name] for name in TEXTS} == TEXTS


def test_null_is_nothing_and_not_the_word_none_however_deep_its_setting_is(config: Config) -> None:
    names = ("data.prompts.system_prompt", f"{SERVER}.tls_cert", f"{SERVER}.extra_args.seed")
    at = config(*(word for name in names for word in (f"--{name}", "null")))
    server = at(f"{STRATEGY}.init_args.server")
    assert at(f"{PROMPTS}.init_args.system_prompt") is server["tls_cert"] is None
    assert server["extra_args"] == {"seed": None}


def test_a_file_is_named_by_its_setting_and_not_read_in_its_place(
    config: Config, tmp_path: Path
) -> None:
    names = ("problems.txt", "judging.py", "problems.csv", "ddp", "cpu", "problems.jsonl")
    for name in names:
        (tmp_path / name).write_text("prompt,answer\n2+2=,4\n")
    words = ("--data.prompts", "problems.txt", "--data.rewards", "judging.py")
    words += (f"--{STRATEGY}", "ddp", "--trainer.accelerator", "cpu", *HELD_OUT, "problems.csv")
    typed, written = config(*words), config(base={"data": {"prompts": "problems.jsonl"}})
    found = {
        "problems.txt": typed(PROMPTS),
        "judging.py": typed("data.init_args.rewards"),
        "problems.csv": typed("trainer.callbacks.0.init_args.prompts"),
        "ddp": typed(STRATEGY),
        "cpu": typed("trainer.accelerator"),
        "problems.jsonl": written(PROMPTS),
    }
    assert found == {name: name for name in names}


def settings_of(found: dict[str, Any], *names: str) -> list[Any]:
    return [found["class_path"], *(found["init_args"][name] for name in names)]


def test_a_data_set_named_alone_keeps_its_name_when_another_of_its_settings_changes(
    config: Config,
) -> None:
    words = ("--data.prompts.limit", "2", "--data.prompts.template", "{prompt}?")
    expected = ["lrl.Prompts", "problems.csv", 2, "{prompt}?"]
    assert settings_of(config(*words)(PROMPTS), "source", "limit", "template") == expected
    for change in ({"limit": 2}, {"init_args": {"limit": 2}}):
        found = config(base={"data": {"init_args": {"prompts": change}}})(PROMPTS)
        assert settings_of(found, "source", "limit") == ["lrl.Prompts", "problems.csv", 2]
    found = config("--data.prompts.source", "x.csv")(PROMPTS)
    assert settings_of(found, "source") == ["lrl.Prompts", "x.csv"]
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    found = config("--data.prompts.limit", "1", base={"data": {"prompts": rows}})(PROMPTS)
    assert settings_of(found, "source", "limit") == ["lrl.Prompts", rows, 1]


def test_a_reward_named_alone_keeps_its_name_when_another_of_its_settings_changes(
    config: Config,
) -> None:
    rewards, weight = "data.init_args.rewards", ("--data.rewards.weight", "2")
    expected = ["lrl.rewards.Function", "judging.py:right", 2.0]
    settings = ("function", "weight")
    base = {"data": {"rewards": {"weight": 2}}}
    assert settings_of(config(*weight)(f"{rewards}.0"), *settings) == expected
    assert settings_of(config(base=base)(rewards), *settings) == expected
    several = config("--data.rewards+", "judging.right", *weight)(rewards)
    assert several[0] == "judging.py:right"
    assert settings_of(several[1], *settings) == ["lrl.rewards.Function", "judging.right", 2.0]


def test_a_held_out_set_named_alone_stays_the_test_split_when_another_of_its_settings_changes(
    config: Config,
) -> None:
    words = (*HELD_OUT, "gsm8k", "--trainer.callbacks.prompts.limit", "2")
    found = config(*words)("trainer.callbacks.0.init_args.prompts")
    assert settings_of(found, "source", "split", "limit") == ["lrl.Prompts", "gsm8k", "test", 2]


USED = {
    "class_path": "lrl.AsyncSingleDevice",
    "init_args": {"generator_devices": 2, "server": {"dtype": "float16"}},
}


@pytest.mark.parametrize("form", ["AsyncFSDP", "lrl.AsyncFSDP", ".class_path"])
def test_another_strategy_keeps_the_settings_of_the_one_before(
    config: Config, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    words = [f"--{STRATEGY}", form]
    if form == ".class_path":
        words = [f"--{STRATEGY}{form}", "AsyncFSDP"]
    words += [f"--{STRATEGY}.server.max_num_seqs", "7"]
    found = config(*words, base={"trainer": {"strategy": USED}})(STRATEGY)
    assert settings_of(found, "generator_devices") == ["lrl.AsyncFSDP", 2]
    server = found["init_args"]["server"]
    assert (server["dtype"], server["max_num_seqs"]) == ("float16", 7)
    assert caplog.messages == [], "nobody has set what only AsyncSingleDevice takes"


@pytest.mark.parametrize("form", ["typed", "written", "written_whole"])
def test_a_setting_that_another_class_does_not_take_is_named_once(
    config: Config, caplog: pytest.LogCaptureFixture, tmp_path: Path, form: str
) -> None:
    used = {"class_path": "lrl.objectives.AIPO", "init_args": {"rho": 4.0}}
    base = {"model": {"init_args": {"objective": used}}}
    other: dict[str, Any] = {"init_args": {"objective": {"class_path": "lrl.objectives.GSPO"}}}
    if form == "written_whole":
        other["class_path"] = "lrl.PolicyModule"
    (tmp_path / "third.yaml").write_text(yaml.safe_dump({"model": other}))
    words = ("--config", "third.yaml") if form != "typed" else ("--model.objective", "GSPO")
    found = config(*words, base=base)("model.init_args.objective")
    assert found["class_path"] == "lrl.objectives.GSPO" and "rho" not in found["init_args"]
    assert caplog.messages == [
        "lrl.objectives.GSPO does not take what was set for lrl.objectives.AIPO, so this is left "
        "out: rho."
    ]
