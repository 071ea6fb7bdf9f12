"""Tools for chat models: the policy calls Python functions, and reads what they return."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from typing import Any

from lrl.environments.base import Environment, Message, Policy, ToolCall
from lrl.environments.tool_function import (
    LONGEST_ERROR,
    BadCallError,
    Tool,
    arguments_of,
    error_text,
    schema_of,
    text_of,
    tool_of,
)
from lrl.errors import ConfigError
from lrl.system.config_errors import at_least


class Tools(Environment):
    """Runs the functions that a turn calls; a turn without a call ends the episode.

    The policy's chat template shows the functions, and `strategy.server.tool_parser` names the
    parser that finds the calls. All calls of a turn run, `async` functions at the same time, and
    the policy reads all results. What it does wrong, and an exception of a function, are results,
    too.

    Args:
        tools: Functions, or their names (`module.function`, `file.py:function`), plain or `async`,
            at the top level of a module. Each parameter has a type, and a line under `Args:` in the
            docstring.
        max_result_characters: Characters after which a result is cut.
        deterministic: Whether the same calls always have the same results; see `Environment`.

    Raises:
        ConfigError: One is no function, or does not say enough of itself.
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
        if isinstance(tools, str) or not isinstance(tools, Sequence) or not tools:
            raise ConfigError(f"Tools.tools is {tools!r}: give a list of functions.")
        functions = [tool_of(tool) for tool in tools]
        self.schemas = [schema_of(tool) for tool in functions]
        self.functions: dict[str, Tool] = {}
        for tool in functions:
            if tool.__name__ in self.functions:
                raise ConfigError(
                    f"Tools.tools has two functions named {tool.__name__}: rename one."
                )
            self.functions[tool.__name__] = tool
        self.max_result_characters = max_result_characters
        self.deterministic = deterministic

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """See `Environment`."""
        return self.schemas

    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        """Plays one episode (`Environment.rollout`)."""
        turn = await policy.turn()
        while turn.calls:
            turn = await policy.turn(await self._results(turn.calls))
        return 0.0

    async def _results(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Runs all calls of a turn, and returns their messages in its order."""
        results = [self._begun(call) for call in calls]
        waiting = [number for number, result in enumerate(results) if not isinstance(result, str)]
        # A call alone is awaited here, in no task of its own: then it is known whose code hangs.
        works = [self._ended(results[number]) for number in waiting]
        ended = [await works[0]] if len(works) == 1 else await asyncio.gather(*works)
        for number, result in zip(waiting, ended, strict=True):
            results[number] = result
        return [
            {"role": "tool", "name": text_of(call.name), "tool_call_id": call.id, "content": result}
            for call, result in zip(calls, results, strict=True)
        ]

    def _begun(self, call: ToolCall) -> Any:
        """Returns the text that a call gives, or the awaitable of an `async` function."""
        if (tool := self.functions.get(call.name)) is None:
            known = ", ".join(self.functions)
            return f"error: there is no tool {call.name[:80]!r}; there are {known}"
        schema = next(one for one in self.schemas if one["function"]["name"] == call.name)
        try:
            result = tool(**arguments_of(call.arguments, tool, schema))
            return result if inspect.isawaitable(result) else self._cut(text_of(result))
        except BadCallError as error:
            return f"error: {error}"[:LONGEST_ERROR]
        except MemoryError:  # the machine's fault, and not the policy's
            raise
        except (Exception, SystemExit) as error:
            return error_text(error)

    async def _ended(self, result: Awaitable[Any]) -> str:
        try:
            return self._cut(text_of(await result))
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # SystemExit would end the process
            return error_text(error)

    def _cut(self, text: str) -> str:
        most = self.max_result_characters
        if len(text) <= most:
            return text
        return f"{text[:most]}\n[cut: the first {most} of {len(text)} characters]"
