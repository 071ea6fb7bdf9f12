"""Tools for chat models: the policy calls Python functions, and reads what they return."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lrl.environments.base import Environment, Message, Policy, ToolCall
from lrl.errors import ConfigError, at_least
from lrl.system.imports import function
from lrl.system.output import writable
from lrl.workers.worker import message_of

Tool = Callable[..., Any]
LONGEST_ERROR = 500
"""Characters of an error that the policy reads."""


class Tools(Environment):
    """Runs the functions that a turn calls; a turn without a call ends the episode.

    The policy's chat template shows the functions, and `strategy.server.tool_parser` names the
    parser that finds the calls. All calls of a turn run, `async` functions at the same time. What
    the policy does wrong is a result, too, as is an exception of a function.

    Args:
        tools: Functions, or their names (`module.function`, `file.py:function`), plain or `async`,
            at the top level of a module. Each parameter has a type, and a line under `Args:` in the
            docstring.
        max_result_characters: Characters after which a result is cut.
        deterministic: Whether the same calls always have the same results; see `Environment`.
    """

    judges_last_turn = True
    gives_rewards = False

    def __init__(
        self,
        tools: Sequence[str | Tool],
        max_result_characters: int = 4000,
        deterministic: bool = False,
    ) -> None:
        at_least(1, "Tools", max_result_characters=max_result_characters)
        self.functions = {tool.__name__: tool for tool in map(_tool_of, tools)}
        self.schemas = [schema_of(tool) for tool in self.functions.values()]
        if len(self.functions) < len(tools):
            raise ConfigError(
                f"Tools.tools has two functions of a name: {', '.join(self.functions)}."
            )
        self.max_result_characters = max_result_characters
        self.deterministic = deterministic

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        return self.schemas

    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        turn = await policy.turn()
        while turn.calls:
            turn = await policy.turn(await self._results(turn.calls))
        return 0.0

    async def _results(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Runs all calls of a turn, and returns their messages in its order."""
        results = [self._begun(call) for call in calls]
        works = [self._ended(result) for result in results if not isinstance(result, str)]
        # A call alone is awaited here, in no task of its own: then it is known whose code hangs.
        ended = [await works[0]] if len(works) == 1 else await asyncio.gather(*works)
        results = [result if isinstance(result, str) else ended.pop(0) for result in results]
        heads = ({"role": "tool", "name": _text_of(c.name), "tool_call_id": c.id} for c in calls)
        return [head | {"content": result} for head, result in zip(heads, results, strict=True)]

    def _begun(self, call: ToolCall) -> Any:
        """Returns the result of a call, or the awaitable of an `async` function."""
        if (tool := self.functions.get(call.name)) is None:
            known = ", ".join(self.functions)
            return f"error: there is no tool {call.name[:80]!r}; there are {known}"
        try:
            result = tool(**_arguments_of(call.arguments))
            return result if inspect.isawaitable(result) else self._cut(_text_of(result))
        except MemoryError:  # the machine's fault, and not the policy's
            raise
        except (Exception, SystemExit) as error:
            return _error_text(error)

    async def _ended(self, result: Awaitable[Any]) -> str:
        try:
            return self._cut(_text_of(await result))
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # SystemExit would end the process
            return _error_text(error)

    def _cut(self, text: str) -> str:
        most = self.max_result_characters
        if len(text) <= most:
            return text
        return f"{text[:most]}\n[cut: the first {most} of {len(text)} characters]"


def _tool_of(tool: Tool | str) -> Tool:
    if isinstance(tool, str):
        try:
            tool = function(tool)
        except ValueError as error:
            raise ConfigError(f"Tools.tools has {tool!r}, and {error}") from error
    return tool


def schema_of(tool: Tool) -> dict[str, Any]:
    """Returns the JSON schema of a tool, by its type hints and docstring."""
    # Here: an environment's process does not need it, and should start without it.
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(tool)
        json.dumps(schema)
    except Exception as error:  # its parser of docstrings raises several kinds
        why = " ".join(str(error).split())
        raise ConfigError(
            f"Tools.tools has {tool.__name__}, which has no schema: {why:.300} Give each parameter "
            'a type, and a line under "Args:" in the docstring.'
        ) from error
    return schema


def _arguments_of(text: str) -> dict[str, Any]:
    """Returns the arguments of a call, which the policy wrote as `text`."""
    arguments = json.loads(text) if text.strip() else {}
    if not isinstance(arguments, dict):
        raise TypeError("the arguments are no JSON object")
    return arguments


def _text_of(result: Any) -> str:
    """Returns what the policy reads of a result: text as it is, everything else as JSON."""
    return writable(result) if isinstance(result, str) else _json(result)


def _json(value: Any) -> str:
    # Half of a surrogate pair has no tokens.
    return writable(json.dumps(value, default=str, ensure_ascii=False))


def _error_text(error: BaseException) -> str:
    return _text_of(f"error: {message_of(error)}"[:LONGEST_ERROR])
