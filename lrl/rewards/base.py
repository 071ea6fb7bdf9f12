"""The interface of a reward, a user's function as one, and the right answer in a row.

A reward gets text and columns, not token ids or tensors: a worker needs no torch to run it.
"""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, Self

from lrl.errors import ConfigError
from lrl.system import imports

Score = float | dict[str, float]
"""Value of a reward for one response: a number, or named parts whose sum counts."""
LARGEST_REWARD = 1e15
"""In size: the sum of squares of float32 gradients overflows from about 1e18 on."""


class GaveUp(float):
    """The reward 0 of a verifier that gave up on a response, counted in `rewards/gave_up`. For an
    error raise an exception instead.

    Args:
        reason: What was too much, for the log.
    """

    reason: str

    def __new__(cls, reason: str) -> Self:
        self = super().__new__(cls, 0.0)
        self.reason = reason
        return self


class Reward(ABC):
    """Judges one response. Subclass it, or pass a plain function (see `Function`).

    Args:
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics; the default of the class, or its Python name, if empty.
    """

    name: str = ""  # default of the argument
    weight: float = 1.0
    binary: bool = False
    """Whether it is 1 for a right response and 0 for a wrong one: its mean is an accuracy."""
    give_up_s: float = 0.0
    """Seconds after which the reward gives up on a response (`GaveUp`); 0 if it never does."""
    deadline_s: float = 0.0
    """Seconds after which it raises an error by itself; 0 if it has no deadline of its own."""

    def __init__(self, weight: float = 1.0, name: str = "") -> None:
        self.weight = weight
        self.name = name or type(self).name or type(self).__name__

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Raises ValueError if no response to this row could be judged; called for every row before
        a run."""
        return None

    @abstractmethod
    def __call__(self, prompt: str, response: str, **columns: Any) -> Score | Awaitable[Score]:
        """Returns the reward of `response` before the weight; may be a coroutine.

        Args:
            prompt: The prompt as its author wrote it.
            response: Text of the response, without its end (`data.skip_special_tokens`).
            columns: The other columns of the row; and four values, which win over columns:
                `finish_reason` (`stop`, `length` or `turns`), `num_tokens`, `turn_rewards` (of the
                environment; empty without one), and `prompt_messages` (of a chat, else None).

        Raises:
            Exception: Any, if the response cannot be judged: it is counted, and is no reward.
        """


class TurnRewards(Reward):
    """The sum of the environment's rewards for the turns; 0 without an environment. A run with an
    environment has it; name it for another weight."""

    name = "environment"

    def __call__(
        self, prompt: str, response: str, *, turn_rewards: Sequence[float] = (), **columns: Any
    ) -> float:
        return float(sum(turn_rewards))


OneReward = Reward | Callable[..., Any] | str


class Function(Reward):
    """A function `(prompt, response, **columns) -> float | dict[str, float]`, plain or `async`, as
    a reward. Of one annotated `-> bool` evaluations log the mean as an accuracy.

    Args:
        function: The function, or its name: `module:function` or `file.py:function`. It must be at
            the top level of a module, from which the reward workers import it.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics; the name of the function if empty.
    """

    def __init__(
        self, function: str | Callable[..., Any], weight: float = 1.0, name: str = ""
    ) -> None:
        if isinstance(function, str):
            try:
                function = imports.function(function)
            except ValueError as error:
                raise ConfigError(f"The reward {function!r}: {error}") from error
        self.function = function
        own_name = getattr(function, "__name__", type(function).__name__)
        super().__init__(weight, name or own_name)
        signature = inspect.signature(function)
        self.binary = signature.return_annotation in (bool, "bool")
        try:
            given = list(signature.bind_partial("", "", **{"any column": ""}).arguments)
        except TypeError:
            given = ["response"]
        # TRL's take lists, `completions`.
        if given[0] == "response" or "prompt" in given[1:] or "completions" in given:
            raise ConfigError(
                f"The reward {own_name} takes {signature}. Define it as `def {own_name}(prompt, "
                "response, **columns)`, for one response; `columns` are those of the row."
            )

    def check_row(self, columns: Mapping[str, Any]) -> None:
        own = ("finish_reason", "num_tokens", "turn_rewards", "prompt_messages")
        known = {*columns, *own} - {"prompt", "response"}
        try:
            inspect.signature(self.function).bind("", "", **dict.fromkeys(known))
        except TypeError as error:
            raise ValueError(f"{error}; the row has only {sorted(columns)}") from error

    def __call__(self, prompt: str, response: str, **columns: Any) -> Score | Awaitable[Score]:
        return self.function(prompt, response, **columns)


def as_reward(reward: OneReward) -> Reward:
    """Returns a callable or an import path as a `Function`."""
    return reward if isinstance(reward, Reward) else Function(reward)


def as_list(rewards: OneReward | Sequence[OneReward] | None) -> list[Reward]:
    if isinstance(rewards, str) or callable(rewards):
        return [as_reward(rewards)]
    return list(map(as_reward, rewards or ()))


def unwrapped(value: Any) -> Any:
    """Returns a number that numpy or torch has wrapped; all else as it is."""
    is_one = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_one else value


def reference_of(columns: Mapping[str, Any], name: str) -> str:
    """Returns the right answer in a column as text, a number without an exponent (0.00005 is
    `5e-05` in Python); raises ValueError for no column, None, NaN, infinity or a collection."""
    if name not in columns:
        raise ValueError(f"the row has no column `{name}`, only {sorted(columns)}")
    value = unwrapped(columns[name])
    is_fraction = isinstance(value, float | Decimal)
    is_missing = value is None or (is_fraction and not math.isfinite(value))
    if is_missing or isinstance(value, bytes | list | tuple | set | dict):
        raise ValueError(
            f"the column `{name}`: {value!r:.80} ({type(value).__name__}) is neither a text nor a "
            "number"
        )
    return f"{Decimal(str(value)):f}" if is_fraction else str(value)


def trial_response(columns: Mapping[str, Any]) -> str:
    """Returns the right answer of a row, or `0` if none is known."""
    for name in ("answer", "solution"):
        with suppress(ValueError):
            if text := reference_of(columns, name):
                return text
    return "0"
