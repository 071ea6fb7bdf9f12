"""Errors for values that jsonargparse would take for something else: a data set for a config, a
number for a row."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SETTINGS_FILES = (".yaml", ".yml", ".json")
PROMPTS = "--data.prompts."
HINTS = {
    "--model": "Did you mean --model.model {}?",
    "--data": "Did you mean --data.prompts {}?",
    "--trainer": "Settings of several groups follow --config.",
}
"""The setting that may be meant by a file or a folder after the name of a group."""


def group_file(words: Sequence[str]) -> str:
    """Returns the error for a file or folder whose content would be read as the settings of a whole
    group."""
    pairs = [
        *zip(words, words[1:], strict=False),
        *(word.split("=", 1) for word in words if "=" in word),
    ]
    for option, value in pairs:
        path = Path(value)
        if option in HINTS and path.exists() and path.suffix.lower() not in SETTINGS_FILES:
            return (
                f"{option} {value}: it takes a class, or a YAML file of settings. "
                f"{HINTS[option].format(value)}"
            )
    return ""


def prompts_setting(words: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the error for a setting of `lrl.Prompts` whose wrong value made it a row of prompts,
    the last one."""
    from lrl.cli import fit_help  # 260 lines that only an error needs

    kinds = {
        one.name: one.kind.partition(" = ")[0]
        for one in fit_help.settings_of("lrl.rollouts.prompts:Prompts", "")
    }
    for name in kinds:
        typed = any(
            word.replace(".init_args.", ".").partition("=")[0] == PROMPTS + name for word in words
        )
        if typed and list(rows[-1]) == [name]:
            return f"{PROMPTS}{name} is {rows[-1][name]!r}; it must be {kinds[name]}."
    return ""
