"""Environments that cannot work."""

from __future__ import annotations

import asyncio
from typing import Any

from lrl.environments import Environment, Policy, Turns


class NoReply(Turns):
    """It lacks `reply`."""


class Lambda(Turns):
    """It cannot be sent to a process."""

    def __init__(self) -> None:
        self.judge = lambda turn: 1.0

    def reply(self, turn: str) -> Any:
        return "", True, self.judge(turn)


class Unmade(Turns):
    """Its constructor raises."""

    def __init__(self) -> None:
        raise FileNotFoundError("there is no level1.txt")

    def reply(self, turn: str) -> Any: ...


class Unloadable(Turns):
    """It can be sent, and not be loaded."""

    def reply(self, turn: str) -> Any: ...

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no screen")

    def __getstate__(self) -> dict[str, Any]:
        return {"level": 1}


class TextStop(Turns):
    stop = "="  # type: ignore[assignment]

    def reply(self, turn: str) -> Any: ...


class LongStop(Turns):
    stop = ("stop",)

    def reply(self, turn: str) -> Any: ...


class EmptyStop(Turns):
    stop = ("",)

    def reply(self, turn: str) -> Any: ...


class AsksForLevel(Turns):
    """It needs a column that the row does not have."""

    def start(self, prompt: str, *, stage: int, **columns: Any) -> None: ...

    def reply(self, turn: str) -> Any: ...


class TakesNoColumns(Turns):
    def start(self, prompt: str) -> None: ...  # type: ignore[override]

    def reply(self, turn: str) -> Any: ...


class TakesNoTurn(Turns):
    def reply(self) -> Any: ...  # type: ignore[override]


class SaysNothing(Turns):
    def reply(self, turn: str) -> Any: ...


class Yields(Turns):
    def reply(self, turn: str) -> Any:
        yield "", True, 1.0


class StartsWithNumber(Turns):
    def start(self, prompt: str, **columns: Any) -> Any:
        return 5

    def reply(self, turn: str) -> Any: ...


class NeedsTheLoop(Turns):
    """It runs an event loop within the one that plays it."""

    def reply(self, turn: str) -> Any:
        import asyncio

        return asyncio.run(asyncio.sleep(0.0, ("", True, 1.0)))


class NeverAsks(Environment):
    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        return 1.0


class AsksTwice(Environment):
    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        await asyncio.gather(policy.turn("1"), policy.turn("2"))
        return 1.0


class Silent(Environment):
    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> Any:
        await policy.turn()
