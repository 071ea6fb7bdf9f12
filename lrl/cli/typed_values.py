"""Reads the value of a setting in jsonargparse's way, but for texts, on the command line and in a
config.

jsonargparse reads a value as YAML at every class on the way to its setting, and passes Python's
text of what it has read on to the next one. So `--data.prompts.system_prompt null` became the word
"None", and a template with a colon a row of prompts. Here the text is passed on as it was typed,
and read once, where the type of its setting is known.

YAML takes a text that begins with # for a comment, so the template "# {question}" was silently left
out, from a file too. It stays a text.
"""

from typing import Any

from jsonargparse import _typehints

NULLS = ("null", "Null", "NULL", "~")
"""YAML's words for nothing."""
_read: Any = _typehints.parse_value_or_config
_read_leaf: Any = _typehints.basic_json_or_yaml_load


def install() -> None:
    """Replaces jsonargparse's reading of values in this process."""
    _typehints.parse_value_or_config = _read_at_the_setting
    _typehints.basic_json_or_yaml_load = _read_number_or_null


def _read_at_the_setting(value: Any, *args: Any, **how: Any) -> tuple[Any, Any]:
    """Returns the value, and the path of the file that it was read from or None."""
    if isinstance(value, _typehints.NestedArg):
        is_last = "." not in value.key  # no further class is on the way
        return (value._replace(val=None) if is_last and value.val in NULLS else value), None
    if _begins_as_comment(value):
        return value, None
    return _read(value, *args, **how)


def _read_number_or_null(value: str) -> Any:
    return value if _begins_as_comment(value) else _read_leaf(value)


def _begins_as_comment(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("#")
