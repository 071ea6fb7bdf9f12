"""Ctrl-C while a command still imports ends it at once, without a word of Python's; YAML that cannot
be read is named with its file and line, and a key that stands twice is refused."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lrl.cli.main import run_command, with_recipe_paths

AT_AN_IMPORT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *where):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
sys.meta_path.insert(0, Interrupts())
from lrl.cli.main import main
sys.exit(main({words!r}))
"""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("fit --config quickstart", name) for name in ("torch", "yaml")),
        ("chat {} 1+1=", "transformers"),
        ("doctor", "lrl.cli.doctor"),
    ],
)
def test_an_interrupt_of_an_import_ends_a_command_without_a_traceback(
    command: str, name: str, quickstart_policy: object
) -> None:
    code = AT_AN_IMPORT.format(name=name, words=command.format(quickstart_policy).split())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT), done.stderr
    assert not done.stderr.strip() and not done.stdout.strip()


CASES = {
    "a tab": ("data:\n\tmax_lag: 1\n", "line 2, column 1"),
    "a second colon": ("data:\n  max_lag: 1: 2\n", "line 2"),
    "a key twice": ("data:\n  max_lag: 1\n  seed: 2\n  max_lag: 2\n", "line 4.*already in line 2"),
    "a key twice in a list": ("a:\n- {b: 1, b: 2}\n", "b is already in line 2"),
    "a list": ("- 1\n", "maps no settings"),
    "nothing": ("", "maps no settings"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("option", [["--config", "{}"], ["-c", "{}"], ["--config={}"]])
def test_a_fault_of_yaml_names_the_file_and_the_line(
    case: str, option: list[str], tmp_path: Path
) -> None:
    text, fault = CASES[case]
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"(?s){path}: .*{fault}"):
        with_recipe_paths(["fit", *(word.format(path) for word in option)])


def test_yaml_on_the_command_line_may_be_long_and_is_checked_as_well() -> None:
    long = ["fit", "--config", "{data: {prompts: " + "x" * 5000 + "}}"]
    assert with_recipe_paths(long) == long
    with pytest.raises(ValueError, match="already in line 1"):
        with_recipe_paths(["fit", "--config", "{data: {max_lag: 1, max_lag: 2}}"])


@pytest.mark.parametrize(
    "text",
    ["a: &b {c: 1}\nd: {<<: *b, c: 2}\n", "\ufeffdata:\n  max_lag: 1\n", "a: [1, 1]\nb: {a: 1}\n"],
)
def test_what_yaml_allows_is_not_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    with_recipe_paths(["fit", "--config", str(tmp_path / "my.yaml")])


def test_a_recipe_without_its_option_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["fit", "quickstart"]) == 2
    assert "Did you mean lrl fit --config quickstart?" in capsys.readouterr().err
