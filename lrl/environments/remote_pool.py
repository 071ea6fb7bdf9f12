"""The environments on other machines, as rank 0 sees them: servers with processes of their own.

The episodes of a lost one fail with `EnvironmentLost`, and are played again elsewhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from lrl.environments.play import Reply, finite, readable
from lrl.environments.worker import WorkerSpec
from lrl.errors import BadAnswer, EnvironmentLost, EpisodeError
from lrl.rewards.failure_stats import EPISODE_KINDS
from lrl.system.remote_workers import CHECK_S, MemberAddress, RemotePool, RemoteWorkers

EPISODES = "/episodes"


class RemoteEnvironment(RemoteWorkers):
    """An environment on another machine; see `RemoteWorkers`, and `lrl.environments.pool.Player`.

    Args:
        address: Where it is.
        pool: Where it belongs.
    """

    kind = "environment"
    lost_error = EnvironmentLost
    leave_s = 20.0

    def __init__(self, address: MemberAddress, pool: RemoteEnvironments) -> None:
        super().__init__(address)
        self.episodes = 0
        self._pool = pool
        self._ends: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        """Whether it has no episode."""
        return not self.episodes

    async def check(self) -> None:
        """See `RemoteWorkers.check`. Ends the episodes of before it was cut off, and plays the
        trial."""
        await self.request("DELETE", EPISODES, CHECK_S)
        if self._pool.trial is not None:
            try:
                await self._pool.trial(self)
            except EnvironmentLost as error:
                raise OSError(str(error)) from error

    async def ask(self, number: int, **message: Any) -> Reply:
        """See `Player.ask`."""
        answer = await self.answered(self._ask(number, message))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def tell(self, number: int, why: str) -> None:
        """See `Player.tell`."""
        if not self.lost:
            task = asyncio.ensure_future(self._end(number, why))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)

    async def _ask(
        self, number: int, message: dict[str, Any]
    ) -> Reply | EpisodeError | EnvironmentLost:
        # Its processes have the deadlines of rank 0's. This one is for a member that does not
        # answer, and yet is alive.
        deadline_s = self._pool.spec.silence_s + CHECK_S
        data = json.dumps(message).encode()
        found = await self.request("POST", f"{EPISODES}/{number}", deadline_s, data=data)
        match found:
            case {"replaced": int(replaced), "answer": answer}:
                self._pool.replaced_by[self.number] = replaced
                return self._read(answer)
        raise BadAnswer(f"{str(found)[:80]!r} is no answer to a turn")

    def _read(self, answer: Any) -> Reply | EpisodeError | EnvironmentLost:
        match answer:
            case {"failed": [str(kind), str(text)]} if kind in EPISODE_KINDS:
                return EpisodeError(kind, f"{text} ({self.name})")
            case {"lost": str(why), "by_other": bool(by_other)}:
                return EnvironmentLost(f"{why} ({self.name})", by_other=by_other)
            case {
                "observation": observation,
                "done": bool(done),
                "reward": reward,
                "tools": [*tools],
                "after": int() | None as after,
            }:
                with suppress(TypeError):
                    seen = readable(observation)
                    return Reply(seen, done, finite(reward), tuple(tools), after=after)
        raise BadAnswer(f"{str(answer)[:80]!r} is no reply")

    async def _end(self, number: int, why: str) -> None:
        place, data = f"{EPISODES}/{number}", json.dumps({"ended": why}).encode()
        with suppress(EnvironmentLost):  # then it has ended with all others
            await self.answered(self.request("DELETE", place, CHECK_S, data=data))


class RemoteEnvironments(RemotePool[RemoteEnvironment]):
    """The environments of a run on other machines. Each method may be called on any thread.

    Args:
        spec: What each of their processes must know.
        alone: Whether rank 0 has no processes of its own.
    """

    def __init__(self, spec: WorkerSpec, alone: bool) -> None:
        super().__init__()
        self.spec = spec
        self.trial: Callable[[RemoteEnvironment], Awaitable[None]] | None = None
        """Plays the beginning of an episode; raises ConfigError if it fails."""
        self._alone = alone

    def terms(self) -> dict[str, Any]:
        """Returns the environment and its limits, as JSON."""
        return self.spec.to_json()

    def reach(self, address: MemberAddress) -> RemoteEnvironment:
        return RemoteEnvironment(address, self)

    def leave_refusal(self, member: RemoteEnvironment) -> str:
        if not self._alone or self.ready != [member]:
            return ""
        return (
            f"{member.title} is the last one that plays episodes. Have another one join "
            "before, or end the run."
        )
