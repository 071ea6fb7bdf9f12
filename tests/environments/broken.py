"""Environments that cannot work."""

from __future__ import annotations

import asyncio
from typing import Any

from lrl.environments import Environment, Policy, Turns


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


class LongStop(Turns):
    stop = ("stop",)

    def reply(self, turn: str) -> Any: ...


class AsksTwice(Environment):
    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        await asyncio.gather(policy.turn("1"), policy.turn("2"))
        return 1.0
