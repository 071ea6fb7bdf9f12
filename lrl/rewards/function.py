"""A user's own function as a reward. It is imported and checked when the run is configured."""

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
        function: The function, or its name: `module:function` or `file.py:function`. It must be at the top level of a
            module, because the reward workers import it from there.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics; the name of the function if empty.

    Raises:
        ValueError: The name leads to no function, or the function does not take `**columns`.
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
        """Names the keyword arguments without a default that no column fills."""
        known = {*columns, "finish_reason", "num_tokens"}
        parameters = inspect.signature(self.function).parameters.values()
        needed = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
        return ", ".join(repr(name) for name in needed if name not in known)

    def __call__(self, prompt: str, response: str, **columns: Any) -> Score | Awaitable[Score]:
        return self.function(prompt, response, **columns)


def as_reward(reward: OneReward) -> Reward:
    """Returns a `Reward` as it is; wraps a callable or an import path in a `Function` of weight 1.

    Raises:
        TypeError: It is none of them.
    """
    if isinstance(reward, Reward):
        return reward
    if isinstance(reward, type) and issubclass(reward, Reward):
        raise ConfigError(f"data.rewards has the class {reward.__name__}: write {reward.__name__}(), an object of it.")
    if callable(reward) or isinstance(reward, str):
        return Function(reward)
    raise TypeError(f"rewards has {reward!r}; each must be a Reward, a function, or its path `module:function`.")


def as_list(rewards: OneReward | Sequence[OneReward]) -> list[OneReward]:
    """Returns rewards as a list; a single one becomes a list of one."""
    return [rewards] if isinstance(rewards, str) or callable(rewards) else list(rewards)


def _imported(path: str) -> Callable[..., Any]:
    try:
        return import_by_name.function(path)
    except ValueError as error:
        shipped = importlib.import_module("lrl.rewards").__all__
        near = import_by_name.did_you_mean(path, shipped) if path.isidentifier() else ""
        raise ConfigError(f"The reward {path!r}: {error}{near}") from error
