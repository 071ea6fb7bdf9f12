"""A user's own function as a reward. It is imported and checked when the run is configured."""

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from lrl.errors import ConfigError
from lrl.rewards.base import Reward, Score
from lrl.system import import_by_name

OneReward = Reward | Callable[..., Any] | str


class Function(Reward):
    """A function `(prompt, response, **columns) -> float | dict[str, float]`, plain or `async`, as
    a reward. One that is annotated `-> bool` tells right from wrong: evaluations log its mean as an
    accuracy.

    Args:
        function: The function, or its name: `module:function` or `file.py:function`. It must be at
            the top level of a module, because the reward workers import it from there.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics; the name of the function if empty.

    Raises:
        ValueError: The name leads to no function, or the function does not take `(prompt, response,
            **columns)`.
    """

    def __init__(
        self, function: str | Callable[..., Any], weight: float = 1.0, name: str = ""
    ) -> None:
        self.function = _imported(function) if isinstance(function, str) else function
        own_name = getattr(self.function, "__name__", type(self.function).__name__)
        super().__init__(weight, name or own_name)
        _check_parameters(self.function, own_name)
        self.binary = inspect.signature(self.function).return_annotation in (bool, "bool")

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Raises ValueError if no column fills an argument behind prompt and response that has no
        default."""
        known = {*columns, "finish_reason", "num_tokens", "turn_rewards"}
        parameters = inspect.signature(self.function).parameters.values()
        by_place = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        by_name = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
        for one in (*by_place[2:], *by_name):
            if one.default is one.empty and one.name not in known:
                raise ValueError(f"the row has no column {one.name!r}, only {sorted(columns)}")

    def __call__(self, prompt: str, response: str, **columns: Any) -> Score | Awaitable[Score]:
        return self.function(prompt, response, **columns)


def as_reward(reward: OneReward) -> Reward:
    """Returns a `Reward` as it is, and a callable or an import path as a `Function`."""
    if isinstance(reward, Reward):
        return reward
    if isinstance(reward, type) and issubclass(reward, Reward):
        raise ConfigError(
            f"data.rewards has the class {reward.__name__}: write {reward.__name__}(), an object "
            "of it."
        )
    if callable(reward) or isinstance(reward, str):
        return Function(reward)
    raise TypeError(
        f"rewards has {reward!r}; each must be a Reward, a function, or its path `module:function`."
    )


def as_list(rewards: OneReward | Sequence[OneReward] | None) -> list[OneReward]:
    """Returns rewards as a list; a single one becomes a list of one, and None an empty list."""
    if rewards is None:
        return []
    return [rewards] if isinstance(rewards, str) or callable(rewards) else list(rewards)


def _check_parameters(function: Callable[..., Any], name: str) -> None:
    parameters = inspect.signature(function).parameters
    kinds = {one.kind for one in parameters.values()}
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [name for name, one in parameters.items() if one.kind in by_place]
    if "completions" in parameters:
        own = {"completions": "response", "prompts": "prompt"}
        named = [one.name for one in parameters.values() if one.kind is not one.VAR_KEYWORD]
        lists = ", ".join(f"{each}=[{own.get(each, f'columns[{each!r}]')}]" for each in named)
        raise ConfigError(
            f"The reward {name} takes `completions`, as a reward function of TRL: a list. A reward "
            "of lrl judges one response, a text: write a function that calls it, such as `def "
            f"{name}_of_one(prompt, response, **columns): return {name}({lists})[0]`."
        )
    is_swapped = "response" in first[:1] or "prompt" in first[1:]
    takes_both = inspect.Parameter.VAR_POSITIONAL in kinds or (len(first) > 1 and not is_swapped)
    if not takes_both or inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(
            f"The reward {name} takes {inspect.signature(function)}. Define it as `def "
            f"{name}(prompt, response, **columns)`; `columns` are those of the row."
        )


def _imported(path: str) -> Callable[..., Any]:
    try:
        return import_by_name.function(path)
    except ValueError as error:
        shipped = importlib.import_module("lrl.rewards").__all__
        near = import_by_name.did_you_mean(path, shipped) if path.isidentifier() else ""
        raise ConfigError(f"The reward {path!r}: {error}{near}") from error
