"""What a typed value becomes: texts stay as they are, files are named and not read, short forms
become classes.

Covers lrl/cli/parsing.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import Say

OWN = {
    "model": {"model": "policy"},
    "data": {"prompts": "problems.csv", "rewards": "judging.py:right"},
}
Config = Callable[..., Any]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> Config:
    """Returns the settings that a run with these words would use, by their path in the config."""
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN))
    (tmp_path / "problems.csv").write_text("prompt,answer\n2+2=,4\n")
    reward = "def right(prompt, response, **columns):\n    return 1.0\n"
    (tmp_path / "judging.py").write_text(reward)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "judging", raising=False)

    def config(path: str, *words: str, base: dict[str, Any] | None = None) -> Any:
        given = ["--config", "own.yaml"]
        if base is not None:
            (tmp_path / "second.yaml").write_text(yaml.safe_dump(base))
            given += ["--config", "second.yaml"]
        status, printed, error = say("fit", *given, *words, "--print_config")
        assert status == 0, error
        found = yaml.safe_load(printed)
        for name in path.split("."):
            found = found[int(name) if name.lstrip("-").isdigit() else name]
        return found

    return config


PROMPTS = "data.init_args.prompts"
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
    typed = config(f"{PROMPTS}.init_args", *words)
    written = config(f"{PROMPTS}.init_args", base=base)
    for found in (typed, written):
        assert {name: found[name] for name in TEXTS} == TEXTS


def test_null_is_nothing_and_not_the_word_none_however_deep_its_setting_is(config: Config) -> None:
    prompt, server = f"{PROMPTS}.init_args.system_prompt", "trainer.strategy.init_args.server"
    assert config(prompt, "--data.prompts.system_prompt", "null") is None
    assert config(f"{server}.tls_cert", "--trainer.strategy.server.tls_cert", "null") is None
    extra = config(f"{server}.extra_args", "--trainer.strategy.server.extra_args.seed", "null")
    assert extra == {"seed": None}


def test_a_file_is_named_by_its_setting_and_not_read_in_its_place(
    config: Config, tmp_path: Path
) -> None:
    names = ("problems.csv", "problems.txt", "problems.jsonl", "judging.py", "ddp", "cpu")
    for name in names:
        (tmp_path / name).write_text("prompt,answer\n2+2=,4\n")
    for name in names[:2]:
        assert config(PROMPTS, "--data.prompts", name) == name
    assert config(PROMPTS, base={"data": {"prompts": names[2]}}) == names[2]
    assert config("data.init_args.rewards", "--data.rewards", "judging.py") == "judging.py"
    held_out = config("trainer.callbacks.0.init_args.prompts", *HELD_OUT, "problems.csv")
    assert held_out == "problems.csv"
    assert config("trainer.strategy", "--trainer.strategy", "ddp") == "ddp"
    assert config("trainer.accelerator", "--trainer.accelerator", "cpu") == "cpu"


def settings_of(found: dict[str, Any], *names: str) -> list[Any]:
    return [found["class_path"], *(found["init_args"][name] for name in names)]


def test_a_data_set_named_alone_keeps_its_name_when_another_of_its_settings_changes(
    config: Config,
) -> None:
    words = ("--data.prompts.limit", "2", "--data.prompts.template", "{prompt}?")
    expected = ["lrl.Prompts", "problems.csv", 2, "{prompt}?"]
    assert settings_of(config(PROMPTS, *words), "source", "limit", "template") == expected
    for change in ({"limit": 2}, {"init_args": {"limit": 2}}):
        found = config(PROMPTS, base={"data": {"init_args": {"prompts": change}}})
        assert settings_of(found, "source", "limit") == ["lrl.Prompts", "problems.csv", 2]
    found = config(PROMPTS, "--data.prompts.source", "x.csv")
    assert settings_of(found, "source") == ["lrl.Prompts", "x.csv"]
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    found = config(PROMPTS, "--data.prompts.limit", "1", base={"data": {"prompts": rows}})
    assert settings_of(found, "source", "limit") == ["lrl.Prompts", rows, 1]


def test_a_reward_named_alone_keeps_its_name_when_another_of_its_settings_changes(
    config: Config,
) -> None:
    rewards, weight = "data.init_args.rewards", ("--data.rewards.weight", "2")
    expected = ["lrl.rewards.Function", "judging.py:right", 2.0]
    settings = ("function", "weight")
    base = {"data": {"rewards": {"weight": 2}}}
    assert settings_of(config(f"{rewards}.0", *weight), *settings) == expected
    assert settings_of(config(rewards, base=base), *settings) == expected
    several = config(rewards, "--data.rewards+", "judging.right", *weight)
    assert several[0] == "judging.py:right"
    assert settings_of(several[1], *settings) == ["lrl.rewards.Function", "judging.right", 2.0]


def test_a_held_out_set_named_alone_stays_the_test_split_when_another_of_its_settings_changes(
    config: Config,
) -> None:
    words = (*HELD_OUT, "gsm8k", "--trainer.callbacks.prompts.limit", "2")
    found = config("trainer.callbacks.0.init_args.prompts", *words)
    assert settings_of(found, "source", "split", "limit") == ["lrl.Prompts", "gsm8k", "test", 2]


STRATEGY = "trainer.strategy"
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
    found = config(STRATEGY, *words, base={"trainer": {"strategy": USED}})
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
    found = config("model.init_args.objective", *words, base=base)
    assert found["class_path"] == "lrl.objectives.GSPO" and "rho" not in found["init_args"]
    assert caplog.messages == [
        "lrl.objectives.GSPO does not take what was set for lrl.objectives.AIPO, so this is left "
        "out: rho."
    ]
