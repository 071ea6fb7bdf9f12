"""The pool of a run's episodes: each is played by a process of this machine or by a member, by
whichever has the fewest for each of its processes.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lrl.environments.base import Environment, Written
from lrl.environments.play import Reply, check_opening
from lrl.environments.processes import EnvironmentProcess, EnvironmentProcesses
from lrl.environments.remote_pool import RemoteEnvironments
from lrl.environments.worker import WorkerSpec
from lrl.errors import ConfigError, EpisodeError, NoEnvironments
from lrl.rewards.failure_stats import EPISODE_KINDS
from lrl.system.event_loop import run_apart
from lrl.system.foreign_code import START_TIMEOUT_S, check_main, names_main, pickled

if TYPE_CHECKING:
    from lrl.types import Prompt

log = logging.getLogger(__name__)

OUTAGE_S = 900.0
"""Seconds that episodes wait for a member if nothing else plays."""
LOG_EVERY_S = 60.0
_POLL_S = 0.25
_LONGEST_SHOWN = 80


class Player(Protocol):
    """A process of this machine, or a member, that plays episodes."""

    name: str
    workers: int
    """Its processes."""
    episodes: int
    """Those that it plays; counted by who opens and closes them."""

    async def ask(self, number: int, **message: Any) -> Reply:
        """Sends an episode's message, and returns the reply.

        Raises:
            EpisodeError: The episode has failed.
            EnvironmentLost: The player has ended through no fault of the episode.
        """

    def tell(self, number: int, why: str) -> None:
        """Sends the end of an episode."""


class EnvironmentPool:
    """Plays the episodes of a run. Use it on one event loop, and `close()`.

    Args:
        environment: Plays them.
        workers: Processes on this machine; 0 if members alone play.
        turn_timeout_s: Most seconds for a reply.
        memory_gib: Memory that a process may allocate, in GiB; None for no limit.
        start_timeout_s: Most seconds for the start of a process.

    Raises:
        ConfigError: The environment cannot be sent to a process.
    """

    def __init__(
        self,
        environment: Environment,
        workers: int,
        *,
        turn_timeout_s: float,
        memory_gib: float | None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        name = type(environment).__name__
        check_main("The processes of an environment")
        sent = pickled(
            environment,
            f"data.environment is {name}",
            "the process of an environment",
            remedy="Write it to a file (in a notebook, begin its cell with `%%writefile "
            f"my_environment.py`) and import {name} from there.",
        )
        self.deterministic = environment.deterministic
        self.counts: Counter[str] = Counter()
        """Episodes that a resume or a loss has had `replayed`, or `restarted`."""
        self.answered_by: Counter[str] = Counter()
        """Turns with a reply, by the machine that gave it."""
        self._spec = WorkerSpec(sent, turn_timeout_s, memory_gib, start_timeout_s)
        self._workers = workers
        self._processes = EnvironmentProcesses(self._spec, workers)
        self.remote = RemoteEnvironments(self._spec, alone=workers == 0)
        """Members, with processes on other machines."""
        self._numbers = itertools.count(1)
        self._logged_at = 0.0

    @property
    def replaced(self) -> int:
        """Processes that were killed or died, on all machines."""
        return self._processes.replaced + self.remote.replaced_by.total()

    @property
    def is_in_main(self) -> bool:
        """Whether the environment is defined in the script that runs, which only this machine's
        processes can import."""
        return names_main(self._spec.environment)

    def open(self, prompt: Prompt) -> EpisodeElsewhere:
        """Opens an episode."""
        return EpisodeElsewhere(self, next(self._numbers), prompt)

    async def player(self) -> Player:
        """Returns the least busy player; waits until there is one.

        Raises:
            NoEnvironments: There was none for `OUTAGE_S`.
            EnvironmentLost: The pool is closed.
        """
        began = time.monotonic()
        while not (players := self._players()):
            waited = time.monotonic() - began
            if waited > OUTAGE_S:
                raise NoEnvironments(self._outage(waited))
            if time.monotonic() - self._logged_at > LOG_EVERY_S:
                self._logged_at = time.monotonic()
                log.warning("%s Episodes wait for one, for %g s.", self._outage(waited), OUTAGE_S)
            await asyncio.sleep(_POLL_S)
        return least_busy(players)

    def _players(self) -> list[Player]:
        return [*self.remote.ready, *self._processes.alive()]

    def _outage(self, waited: float) -> str:
        lost = self.remote.last_loss
        cause = f" The last one was lost because: {lost}." if lost else ""
        return (
            f"No environment has played for {waited:.0f} s: data.environment_workers is 0, and no "
            f"member of kind environment serves.{cause}"
        )

    def start(
        self, prompt: Prompt | None, turn: Written, check: Callable[[Reply, Reply], Any]
    ) -> None:
        """Allows episodes. Plays the beginning of one in a process of this machine, if it has any,
        and on each member before it gets episodes.

        Args:
            prompt: Its prompt; None to start the process alone.
            turn: Its first turn.
            check: Raises EpisodeError for an opening, or a reply to the turn, that the policy cannot
                read.

        Raises:
            ConfigError: The environment cannot be loaded, or the episode has failed.
            ConfigError: The process has ended while it started.
            TimeoutError: The process did not start in time.
        """
        self._processes.open()
        trial = None if prompt is None else partial(self._try_out, prompt, turn, check)
        self.remote.trial = trial

        async def try_here() -> None:
            process = EnvironmentProcess(self._spec)
            try:
                await process.wait_ready()
                if trial is not None:
                    await trial(process)
            finally:
                process.kill()

        if self._workers:
            run_apart(try_here)

    async def _try_out(
        self, prompt: Prompt, turn: Written, check: Callable[[Reply, Reply], Any], player: Player
    ) -> None:
        number = next(self._numbers)
        try:
            opening = await player.ask(number, prompt=_packed(prompt))
            check_opening(opening)
            check(opening, await player.ask(number, **turn._asdict()))
        except EpisodeError as error:
            raise ConfigError(
                f"data.environment was tried with prompt {prompt.id} and the turn "
                f"{turn.text[:_LONGEST_SHOWN]!r}, before any is sampled, and failed: {error}. "
                f"The row's columns: {', '.join(prompt.columns) or 'none'}. "
                f"{EPISODE_KINDS[error.kind]}"
            ) from None
        finally:
            player.tell(number, "")

    def close(self) -> None:
        """Kills all processes, whatever they are doing. May be called twice."""
        self.remote.close()
        self._processes.close()


class EpisodeElsewhere:
    """An episode that another process plays; see `lrl.rollouts.episodes.episode.Conversation`."""

    def __init__(self, pool: EnvironmentPool, number: int, prompt: Prompt) -> None:
        self._pool = pool
        self._number = number
        self._prompt = prompt
        self._player: Player | None = None

    async def begin(self) -> Reply:
        """Begins it."""
        self._player = player = await self._pool.player()
        player.episodes += 1
        return await player.ask(self._number, prompt=_packed(self._prompt))

    async def reply(self, turn: Written) -> Reply:
        """Gives it a turn, and returns the reply."""
        player = self._player
        assert player is not None, "it has begun"
        reply = await player.ask(self._number, **turn._asdict())
        self._pool.answered_by[player.name] += 1
        return reply

    def close(self, why: str = "") -> None:
        """Ends it, if it has not ended; `why` is for those who still ask in it."""
        if self._player is not None:
            self._player.episodes -= 1
            self._player.tell(self._number, why)


def least_busy(players: Iterable[Player]) -> Player:
    """Returns the first of the players with the fewest episodes for each process, counting one
    more."""
    return min(players, key=lambda one: (one.episodes + 1) / one.workers)


def _packed(prompt: Prompt) -> str:
    """Returns prompt and columns for the process alone to unpickle; a column `prompt` or `policy`
    would clash with the arguments."""
    columns = {
        name: value for name, value in prompt.columns.items() if name not in ("prompt", "policy")
    }
    return base64.b64encode(pickle.dumps((prompt.text, columns))).decode()
