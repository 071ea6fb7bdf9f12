"""Environments for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Any

from lrl.environments import Environment, Policy, Turns
from lrl.environments.base import Answer

VOWELS = ("a", "e", "i", "o", "u", "A", "E", "I", "O", "U", *"0123456789")


class Echo(Turns):
    """A turn ends at a vowel or a digit, which comes back in brackets; three turns an episode, each
    worth its length."""

    stop = VOWELS
    deterministic = True

    def start(self, prompt: str, **columns: Any) -> None:
        self.turns = 0

    def reply(self, turn: str) -> Answer:
        self.turns += 1
        return f"[{turn[-1:]}]", self.turns == 3, float(len(turn))


class Odd(Turns):
    """Does what the turn says."""

    deterministic = True

    async def start(self, prompt: str, **columns: Any) -> str:
        self.history = [prompt]
        return f"{prompt} {columns.get('level', '')}".strip()

    async def reply(self, turn: str) -> Any:
        self.history.append(turn)
        match turn:
            case "raise":
                raise KeyError("the key")
            case "exit":
                raise SystemExit(3)
            case "die":
                os._exit(9)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "leak":
                return bytearray(2**40)
            case "hang":
                time.sleep(60.0)
            case "wait":
                await asyncio.sleep(60.0)
            case "cancel":
                raise asyncio.CancelledError
            case "deaf":
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60.0)
                await asyncio.sleep(60.0)
            case "thread":
                await asyncio.to_thread(time.sleep, 60.0)
            case "long":
                return "x" * 2**26, False, 0.0
            case "swapped":
                return "one", 1.0, True
            case "pair":
                return "one", False
            case "nan":
                return "one", False, float("nan")
            case "number":
                return 7, False, 0.0
            case "set":
                return [{"role": "user", "content": "one", "names": {1}}], False, 0.0
            case "end":
                return "", True, 1.0
        return "|".join(self.history), False, 0.25


# ---- environments that cannot work


class Unmade(Turns):
    """Its constructor raises."""

    def __init__(self) -> None:
        raise FileNotFoundError("there is no level1.txt")

    def reply(self, turn: str) -> Any: ...


class Unloadable(Turns):
    """It can be sent, and not be loaded."""

    def reply(self, turn: str) -> Any: ...

    def __reduce__(self) -> Any:
        return open, ("no screen",)


class LongStop(Turns):
    stop = ("stop",)

    def reply(self, turn: str) -> Any: ...


class AsksTwice(Environment):
    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        await asyncio.gather(policy.turn("1"), policy.turn("2"))
        return 1.0
