"""A Python function as a tool: its JSON schema for the policy, and a call with the arguments that
the policy has written."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from lrl.errors import ConfigError
from lrl.system.import_by_name import function
from lrl.system.writable_text import writable
from lrl.workers.user_code import message_of

Tool = Callable[..., Any]
LONGEST_ERROR = 500
"""Characters of an error that the policy reads."""
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""The values that Python reads from JSON of these types."""


class BadCallError(ValueError):
    """A call that the tool does not take; the message is for the policy."""


def tool_of(tool: Tool | str) -> Tool:
    """Returns a tool, which may be given by its name; raises ConfigError if there is none."""
    if not isinstance(tool, str):
        return tool
    try:
        return function(tool)
    except ValueError as error:
        raise ConfigError(f"Tools.tools has {tool!r}, and {error}") from error


def schema_of(tool: Tool) -> dict[str, Any]:
    """Returns the JSON schema that a chat template shows the policy.

    transformers makes it of the type hints and of the docstring, in Google's form with a part
    `Args:`.

    Raises:
        ConfigError: They do not say enough.
    """
    # Here: an environment's process does not need it, and should start without it.
    from transformers.utils import get_json_schema

    name = getattr(tool, "__name__", type(tool).__name__)
    if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        raise ConfigError(f"Tools.tools has {name}, a {type(tool).__name__}: give a function.")
    for one in inspect.signature(tool).parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise ConfigError(
                f"Tools.tools has {name}, and the policy cannot fill its parameter {one}: name each "
                "parameter, with a type."
            )
    try:
        schema = get_json_schema(tool)
        json.dumps(schema)
    except Exception as error:  # its parser of docstrings raises several kinds
        why = " ".join(str(error).split())
        raise ConfigError(
            f"Tools.tools has {name}, which has no schema: {why:.300} Give each parameter a type, "
            'and a line under "Args:" in the docstring.'
        ) from error
    if schema["function"]["name"] != name:
        raise ConfigError(f"Tools.tools has {name}, and its schema another name.")
    return schema


def arguments_of(text: str, tool: Tool, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call.

    Args:
        text: As the policy wrote them.
        tool: The tool.
        schema: Of `schema_of`.

    Raises:
        BadCallError: They are no JSON, or do not fit the tool.
    """
    try:
        arguments = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise BadCallError(f"the arguments are no JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise BadCallError("the arguments are no JSON object")
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        raise BadCallError(str(error)) from error
    properties = schema["function"]["parameters"].get("properties", {})
    for name, value in arguments.items():
        _check_type(name, value, properties.get(name, {}))
    return arguments


def _check_type(name: str, value: Any, schema: dict[str, Any]) -> None:
    """Raises BadCallError for a value of another type than the schema's; what is within a list or an
    object is the tool's own affair."""
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if not types or (value is None and schema.get("nullable")):
        return
    of_bool = isinstance(value, bool) and "boolean" not in types
    if of_bool or not any(isinstance(value, JSON_TYPES.get(one, object)) for one in types):
        raise BadCallError(
            f"{name} should be of type {' or '.join(types)}, and is {_json(value):.80}"
        )
    if "enum" in schema and value not in schema["enum"]:
        raise BadCallError(f"{name} should be one of {_json(schema['enum'])}")


def text_of(result: Any) -> str:
    """Returns what the policy reads of a result: text as it is, everything else as JSON."""
    return writable(result) if isinstance(result, str) else _json(result)


def _json(value: Any) -> str:
    # Half of a surrogate pair has no tokens.
    return writable(json.dumps(value, default=str, ensure_ascii=False))


def error_text(error: BaseException) -> str:
    """Returns what the policy reads of an exception."""
    return text_of(f"error: {message_of(error)}"[:LONGEST_ERROR])
