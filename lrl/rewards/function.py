"""A user's own function as a reward. What it needs is looked up when the run is configured, not at the first answer."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from lrl.rewards.base import Reward, Score
from lrl.runtime import import_by_name
from lrl.runtime.config_errors import ConfigError

OneReward = Reward | Callable[..., Any] | str


class Function(Reward):
    """A function `(prompt, response, **columns) -> float | dict[str, float]`, plain or `async`, as a reward.

    Args:
        function: The function, or its name: `module:function` or `file.py:function`. It must live at the top level of a
            module, because the reward workers import it from there.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics; the function's own name if empty.

    Raises:
        ValueError: If the path leads to no function, or the function does not take `**columns`.
    """

    def __init__(self, function: str | Callable[..., Any], weight: float = 1.0, name: str = "") -> None:
        self.function = _imported(function) if isinstance(function, str) else function
        own_name = getattr(self.function, "__name__", type(self.function).__name__)
        super().__init__(weight, name or own_name)
        kinds = {parameter.kind for parameter in inspect.signature(self.function).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ConfigError(
                f"Function(function={function!r}): {own_name} does not take **columns, which carries the row's other "
                f"columns. Define it as `def {own_name}(prompt, response, **columns)`."
            )

    def missing_column(self, columns: Collection[str]) -> str:
        """See `Reward.missing_column`: the keyword arguments that the function asks for and has no default for."""
        there = {*columns, "finish_reason", "num_tokens"}
        asked = inspect.signature(self.function).parameters.values()
        needed = [one.name for one in asked if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
        return ", ".join(repr(name) for name in needed if name not in there)

    def __call__(self, prompt: str, response: str, **columns: Any) -> Score | Awaitable[Score]:
        """What the function gives."""
        return self.function(prompt, response, **columns)


def as_reward(thing: Reward | Callable[..., Any] | str) -> Reward:
    """`thing` itself if it is a `Reward`; a callable or an import path as a `Function` of weight 1.

    Raises:
        TypeError: If it is none of them.
    """
    if isinstance(thing, Reward):
        return thing
    if callable(thing) or isinstance(thing, str):
        return Function(thing)
    raise TypeError(f"rewards has {thing!r}; each must be a Reward, a function, or its path `module:function`.")


def as_list(rewards: OneReward | Sequence[OneReward]) -> list[OneReward]:
    """Rewards as a list; one alone becomes a list of one."""
    return [rewards] if isinstance(rewards, str) or callable(rewards) else list(rewards)


def _imported(path: str) -> Callable[..., Any]:
    try:
        return import_by_name.function(path)
    except ValueError as error:
        shipped = importlib.import_module("lrl.rewards").__all__
        near = import_by_name.did_you_mean(path, shipped) if path.isidentifier() else ""
        raise ConfigError(f"The reward {path!r}: {error}{near}") from error
