"""Environments in the process of the test, on its loop and clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from lrl.environments import Environment, Written
from lrl.environments.play import Play, Reply
from lrl.errors import EpisodeError, WorkerLost
from lrl.rollouts.episodes.environment_of_run import EnvironmentOfRun
from lrl.types import Prompt


class Here:
    """Plays episodes of an environment; those of `lost` are lost at that call, once."""

    def __init__(
        self, environment: Environment, lost: dict[int, int] | None = None, by_other: bool = False
    ) -> None:
        self.environment = environment
        self.counts: Counter[str] = Counter()
        self.open_now = 0
        self.lost = lost or {}
        """Number of an opened episode -> its call that fails."""
        self.by_other = by_other
        self.opened = 0

    def open(self, prompt: Prompt) -> EpisodeHere:
        self.open_now += 1
        self.opened += 1
        return EpisodeHere(self, prompt, self.lost.pop(self.opened, 0))


class EpisodeHere:
    """An episode."""

    def __init__(self, host: Here, prompt: Prompt, lost_at: int) -> None:
        self.host = host
        self.lost_at = lost_at
        self.calls = 0
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()
        self.play = Play(host.environment, self.replies.put_nowait)
        self.task = asyncio.ensure_future(self.play.run(prompt.text, prompt.columns))

    async def begin(self) -> Reply:
        self.calls += 1
        if self.calls == self.lost_at:
            raise WorkerLost("its process has ended", by_other=self.host.by_other)
        reply = asyncio.ensure_future(self.replies.get())
        await asyncio.wait({reply, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if not reply.done() and (error := self.task.exception()):
            reply.cancel()
            kind = "tool_timeout" if isinstance(error, TimeoutError) else "environment_error"
            raise EpisodeError(kind, repr(error))
        return await reply

    async def reply(self, turn: Written) -> Reply:
        self.play.wrote(turn)
        return await self.begin()

    def close(self) -> None:
        self.host.open_now -= 1
        self.task.cancel()


def of_run(played: Here | Environment, **settings: Any) -> EnvironmentOfRun:
    """Returns the environment of a run; a `Here` plays its own."""
    limits = {"max_tokens": 1000, "max_prompt_tokens": 1000, "max_turns": 8, "max_turn_tokens": 20}
    limits |= {"turn_timeout_s": 60.0, "episode_timeout_s": 1000.0}
    workers = {"environment_workers": 1, "environment_memory_gib": None}
    environment = played.environment if isinstance(played, Here) else played
    found = EnvironmentOfRun(environment, **limits | workers | settings)
    if isinstance(played, Here):
        found.pool = played  # type: ignore[assignment]
    return found
