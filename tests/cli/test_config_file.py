"""A config that cannot be read: the error names the file and the line, and shows the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lrl.cli import config_file
from lrl.cli.config_file import check_files
from lrl.cli.main import main

BEGIN = "model:\n  model: ./policy\n"

SYNTAX = {
    "a tab": (
        BEGIN + "data:\n  prompts: a.jsonl\n\tmax_lag: 1\n",
        5,
        "→max_lag: 1",
        "Indent with spaces",
    ),
    "an indentation": (
        BEGIN + " data:\n  prompts: a.jsonl\n",
        3,
        " data:",
        "Indent the line like its neighbours",
    ),
    "a bracket": (
        BEGIN + "data:\n  prompts: [a, b\n  max_lag: 1\n",
        5,
        "  max_lag: 1",
        "begins in line 4",
    ),
    "a brace": (
        "model: {model: a, lr: 1e-5\n",
        1,
        "model: {model: a, lr: 1e-5",
        "Close the bracket",
    ),
    "a quote": ('model:\n  model: "./policy\n', 2, '  model: "./policy', "Close the quote"),
    "JSON cut short": (
        '{"model": {"model": "./policy"}, "data": {',
        1,
        '"data": {',
        "Close the bracket",
    ),
    "a second colon": (
        "model: ./policy: x\n",
        1,
        "model: ./policy: x",
        "quote a text that has a colon",
    ),
    "an anchor that is not there": (
        "model:\n  model: *policy\n",
        2,
        "  model: *policy",
        "'policy'",
    ),
    "a sign that begins nothing": ("model:\n  model: @policy\n", 2, "  model: @policy", "'@'"),
    "a tag of nobody": ("model:\n  model: !policy x\n", 2, "  model: !policy x", "!policy"),
    "two documents": ("model: a\n---\ndata: b\n", 2, "---", "--config for each"),
    "a setting twice": ("model:\n  lr: 1\n  dtype: a\n  lr: 2\n", 4, "  lr: 2", "first in line 2"),
    "a group twice": (
        "trainer:\n  devices: 2\ntrainer:\n  max_steps: 1\n",
        3,
        "trainer:",
        "first in line 1",
    ),
}


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["fit", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("lrl: error: ") and len(message.splitlines()) <= 5, message
    return message


@pytest.mark.parametrize("case", SYNTAX)
@pytest.mark.parametrize("option", ["--config", "-c", "--config=", "--trainer"])
def test_a_fault_of_yaml_names_the_file_and_the_line_and_shows_the_line(
    case: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, line, shown, named = SYNTAX[case]
    file = tmp_path / "own.yaml"
    file.write_text(text)
    message = error(capsys, *([f"{option}{file}"] if option.endswith("=") else [option, str(file)]))
    first, second, *_ = message.splitlines()
    assert f"{option.rstrip('=')} {file}, line {line}, column" in first and named in first
    assert second.startswith(f"  {line} | ") and second.endswith(shown)


def test_yaml_on_the_command_line_is_checked_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert "line 1" in error(capsys, "--config", "data: {max_lag: 2, max_lag: 3}")


UNREADABLE = {
    "nothing": (b"", "is empty"),
    "comments alone": (b"# the model comes later\n", "is empty"),
    "text": (b"quickstart\n", "holds the text 'quickstart'"),
    "a list": (b"- model\n- data\n", "holds a list"),
    "latin-1": ("model:\n  model: ./é\n".encode("latin-1"), ", line 2: the byte 0xe9 is no UTF-8"),
    "UTF-16": ("model:\n  model: ./e\n".encode("utf-16"), "is UTF-16"),
    "a control character": (b"model:\n  model: \x07\n", ", line 2: the character '\\x07'"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_config_that_holds_no_settings_is_named_with_what_it_holds(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, named = UNREADABLE[case]
    file = tmp_path / "own.yaml"
    file.write_bytes(content)
    message = error(capsys, "--config", str(file))
    assert f"--config {file}" in message and named in message


def test_a_folder_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--config {tmp_path} cannot be read" in error(capsys, "--config", str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffmodel:\n  model: a\n",
        "model: &own {model: a}\nother: {<<: *own, <<: {b: 1}}\n",
        "data:\n  prompts:\n  - prompt: a\n    answer: b\n  - prompt: a\n",
        "model:\n  model: &loop [*loop]\n",
        "trainer:\n  max_steps: ${data.init_args.max_lag}\n",
    ],
)
def test_what_yaml_allows_is_not_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    read, fault = config_file.read(file)
    assert not (fault or config_file.fault_of(read) or config_file.unlike_settings(read))
    check_files(["fit", "--config", str(file)])
