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

from lrl.cli.main import main

OWN = {
    "model": {"model": "policy"},
    "data": {"prompts": "problems.csv", "rewards": "judging.py:right"},
}
Config = Callable[..., Any]


@pytest.fixture
def config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Config:
    """Returns the settings that a run with these words would use, by their path in the config."""
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN))
    (tmp_path / "problems.csv").write_text("prompt,answer\n2+2=,4\n")
    reward = "def right(prompt, response, **columns):\n    return 1.0\n"
    (tmp_path / "judging.py").write_text(reward)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "argv", ["lrl"])
    monkeypatch.delitem(sys.modules, "judging", raising=False)

    def config(path: str, *words: str, base: dict[str, Any] | None = None) -> Any:
        given = ["--config", "own.yaml"]
        if base is not None:
            (tmp_path / "second.yaml").write_text(yaml.safe_dump(base))
            given += ["--config", "second.yaml"]
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["fit", *given, *words, "--print_config"])
        printed = capsys.readouterr()
        assert ended.value.code == 0, printed.err
        found = yaml.safe_load(printed.out)
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


def test_a_group_of_settings_may_be_a_file_of_its_own(config: Config, tmp_path: Path) -> None:
    (tmp_path / "trainer.yaml").write_text("max_steps: 7\n")
    (tmp_path / "data.yaml").write_text(
        yaml.safe_dump({"class_path": "lrl.RolloutDataModule", "init_args": OWN["data"]})
    )
    assert config("trainer.max_steps", "--trainer", "trainer.yaml") == 7
    assert config(PROMPTS, "--data", "data.yaml") == "problems.csv"


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
