"""The loop of an episode: a turn of the policy, the environment's reply, the next turn.

It stands between the controller and a pool. A turn is one request, so a slot of a generator is free
while the environment thinks. Each turn is a rollout of its own until it is joined to the episode's,
together with its reply; so the first turns of a group are one request.

A checkpoint may come at any wait. `Rollout.open_turn` is then being written and continues, or is
whole and waits for its reply. What the environment knew is lost with its process: it begins again
and gets the recorded turns, if it is deterministic. If not, or if it replies otherwise, the episode
begins anew.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lrl.environments import Written
from lrl.environments.base import BEGINNING, ToolCall
from lrl.environments.external_agents import ExternalEpisode
from lrl.environments.play import Reply, check_opening
from lrl.environments.pool import EpisodeElsewhere
from lrl.errors import EpisodeError, WorkerLost
from lrl.rollouts.controller import Write
from lrl.rollouts.episodes.environment_of_run import EnvironmentOfRun, check_prompt
from lrl.rollouts.episodes.observations import Transcript
from lrl.rollouts.policy_text import PolicyText, turn_stop_tokens
from lrl.routing.dispatch import Home
from lrl.system.event_loop import together
from lrl.types import ENVIRONMENT, Fork, Prompt, Rollout, Sampling

ATTEMPTS, ATTEMPTS_OF_OTHERS = 5, 50
"""Times that an episode may lose its environment, through no fault of another episode, and through
the fault of others, one of which fails each time."""

FindCalls = Callable[
    [list[int], int, Sequence[dict[str, Any]]], Awaitable[tuple[str, list[ToolCall]]]
]
"""Returns the text of a turn without its calls of tools, and the calls, from its tokens, its number
and the schemas of the tools (`lrl.generators.tool_calls.ToolCallParser`)."""
Conversation = EpisodeElsewhere | ExternalEpisode
"""The environment's side. `begin` and `reply` raise EpisodeError, and WorkerLost if the environment
has ended through no fault of the episode."""


@dataclass
class Episodes:
    """Writes the rollouts of an environment: turns with `write`, and between them what the
    environment writes."""

    of_run: EnvironmentOfRun
    write: Write
    policy: PolicyText
    find_calls: FindCalls | None = None
    """None for an environment without tools."""

    async def generate(
        self, prompt: Prompt, rollouts: Sequence[Rollout], sampling: Sampling, **how: Any
    ) -> None:
        """Plays every unfinished rollout to its end (`lrl.rollouts.controller.Write`)."""
        of_environment = turn_stop_tokens(self.policy.tokenizer, self.of_run.environment)
        stops = {*sampling.stop_tokens, *of_environment}
        sampling = replace(sampling, stop_tokens=tuple(sorted(stops)))
        episodes = [
            Episode(self, prompt, rollout, sampling, write=partial(self.write, **how))
            for rollout in rollouts
            if not rollout.finished
        ]
        try:
            # Agents elsewhere come one after the other; else first turns are one request.
            if self.of_run.external is not None:
                await together(_play([episode]) for episode in episodes)
            else:
                await _play(episodes)
        finally:
            for episode in episodes:
                episode.close()


@dataclass(eq=False)
class Episode:
    """One rollout, at play; it grows in place, and may have turns of an earlier run.
    `sampling.max_tokens` is of the whole episode after its prompt."""

    episodes: Episodes
    prompt: Prompt
    rollout: Rollout
    sampling: Sampling
    write: Write

    def __post_init__(self) -> None:
        self.home = Home()
        self._of_run = self.episodes.of_run
        self._transcript: Transcript
        self._conversation: Conversation | None = None
        self._losses = Counter[bool]()
        """Whether another episode was at fault -> losses."""

    async def play(self) -> None:
        loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)
        try:
            async with limit:
                while (turn := self.rollout.open_turn) is not None:
                    if not turn.finished:
                        await self.write_turns([turn])
                    if limit.when() is None:
                        limit.reschedule(loop.time() + self._of_run.timeout_s)
                    await self._answer(turn)
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"not at its end {self._of_run.timeout_s:g} s after its first turn"
            self._fail(EpisodeError("episode_timeout", text))
        self.close()

    async def begin(self, loss: WorkerLost | None = None) -> None:
        """Opens the environment's side, after a `loss` again, and lets it know the recorded turns;
        else the episode begins anew."""
        try:
            if loss is not None:
                self._count_loss(loss)
            while not await self._opened():
                pass
        except EpisodeError as error:
            self._fail(error)

    async def write_turns(
        self, turns: list[Rollout], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Writes turns, with one request; calls `ended` at the end of each."""
        recorded = self.rollout.token_ids
        read = [recorded[place] for place in self.rollout.context]
        prompt = replace(self.prompt, token_ids=self.prompt.token_ids + read)
        tokens = min(self._of_run.max_turn_tokens, self._max_tokens - len(recorded))
        sampling = replace(self.sampling, n=len(turns), max_tokens=tokens)
        await self.write(prompt, turns, sampling, ended=ended, home=self.home)

    async def _answer(self, turn: Rollout) -> None:
        try:
            if turn.cut:
                self._record(turn, Reply(), [])
                return
            assert self._conversation is not None, "it has begun"
            number = len(self.rollout.turn_ends)
            written = await self._written(turn.token_ids, number, self.rollout.context)
            reply = await self._conversation.reply(written)
            self._record(turn, reply, self._transcript.ids(reply, written))
        except WorkerLost as error:
            await self.begin(error)
        except EpisodeError as error:
            self._fail(error)

    def _fail(self, error: EpisodeError) -> None:
        """Ends the episode without a reward."""
        self.close()
        self.rollout.failure = str(error)
        self.rollout.open_turn = None
        self.rollout.finish_reason = "failed"

    def close(self) -> None:
        if self._conversation is not None:
            self._conversation.close()
            self._conversation = None

    @property
    def _max_tokens(self) -> int:
        if self._of_run.max_prompt_tokens is None:
            return self.sampling.max_tokens
        versions = self.rollout.versions
        turns = (place for place, by in enumerate(versions) if by != ENVIRONMENT)
        return next(turns, len(versions)) + self.sampling.max_tokens

    async def _opened(self) -> bool:
        """Opens the environment's side; returns whether it stands where the rollout stands."""
        self.close()
        if self.rollout.turn_ends and not self._of_run.environment.deterministic:
            self._begin_anew()
        try:
            self._conversation = self._of_run.pool.open(self.prompt)
            self._transcript = Transcript(
                self.prompt,
                self.episodes.policy,
                self._of_run.environment,
                parses=self.episodes.find_calls is not None,
            )
            opening = await self._conversation.begin()
            check_opening(opening)
            if self.rollout.open_turn is None:
                self._observe(self._transcript.ids(opening, None))
                return True
            if await self._replayed(self._conversation, opening):
                self._of_run.pool.counts["replayed"] += bool(self.rollout.turn_ends)
                return True
        except WorkerLost as error:
            self._count_loss(error)
            return False
        self._begin_anew()
        return False

    async def _replayed(self, conversation: Conversation, reply: Reply) -> bool:
        """Gives the environment the recorded turns; returns whether it gives the recorded
        replies. An episode with branches is not replayed."""
        rollout = self.rollout
        end_of_turn = 0
        written = None
        if rollout.forks:
            return False
        recorded = zip(rollout.turns, rollout.turn_rewards, strict=True)
        for number, (turn, reward) in enumerate(recorded):
            observation = self._transcript.ids(reply, written)
            if observation != rollout.token_ids[end_of_turn : turn.start]:
                return False
            written = await self._written(
                rollout.token_ids[turn.start : turn.stop], number, range(turn.start)
            )
            reply = await conversation.reply(written)
            if reply.done or reply.reward != reward:
                return False
            end_of_turn = turn.stop
        return self._transcript.ids(reply, written) == rollout.token_ids[end_of_turn:]

    def _begin_anew(self) -> None:
        self._of_run.pool.counts["restarted"] += 1
        rollout = self.rollout
        for name in ("token_ids", "logprobs", "versions", "turn_ends", "turn_rewards", "forks"):
            setattr(rollout, name, [])
        rollout.open_turn = None

    def _count_loss(self, error: WorkerLost) -> None:
        self._losses[error.by_other] += 1
        most, by = (ATTEMPTS_OF_OTHERS, " by other episodes") if error.by_other else (ATTEMPTS, "")
        if self._losses[error.by_other] == most:
            raise EpisodeError("environment_lost", f"{most} times{by}, at last: {error}")

    def _record(self, turn: Rollout, reply: Reply, observation: list[int]) -> None:
        """Adds a turn and its reply, between two waits: no checkpoint has half of it."""
        rollout = self.rollout
        rollout.token_ids += turn.token_ids
        rollout.logprobs += turn.logprobs
        rollout.versions += turn.versions
        rollout.turn_ends.append(len(rollout.token_ids))
        rollout.turn_rewards.append(reply.reward)
        rollout.open_turn = None
        if reply.done:
            rollout.finish_reason = "stop"
        elif turn.cut:
            rollout.finish_reason = "length"
        elif len(rollout.turn_ends) >= self._of_run.max_turns:
            rollout.finish_reason = "turns"
        else:
            self._observe(observation, reply.after)

    def _observe(self, observation: list[int], after: int | None = None) -> None:
        """Adds an observation and opens the turn after it; without room for one of that turn's
        tokens, the episode is cut before the observation. Of a branch (`Reply.after`) only those
        tokens are added that no other has."""
        rollout = self.rollout
        end = len(rollout.token_ids)
        fork = Fork(end, end)
        if after is not None:
            before = rollout.path_to(rollout.turn_ends[after]) if after != BEGINNING else []
            read = [rollout.token_ids[place] for place in before] + observation
            fork, shared = shared_with(rollout, read)
            observation = read[shared:]
        most = self._of_run.max_prompt_tokens
        if not end and most is not None:
            check_prompt(len(self.prompt.token_ids) + len(observation), most)
        elif end + len(observation) >= self._max_tokens:
            rollout.finish_reason = "length"
            return
        if fork.after != end:
            rollout.forks.append(fork)
        rollout.token_ids += observation
        rollout.logprobs += [0.0] * len(observation)
        rollout.versions += [ENVIRONMENT] * len(observation)
        rollout.open_turn = Rollout()

    async def _written(self, token_ids: list[int], number: int, context: Sequence[int]) -> Written:
        """Returns a turn that follows the prompt and the tokens at the places `context`."""
        before = self.prompt.token_ids + [self.rollout.token_ids[place] for place in context]
        decode, find_calls = self.episodes.policy.decode, self.episodes.find_calls
        text = decode(token_ids, before)
        if not (tools := self._transcript.tools):
            return Written(text, token_ids, content=text)
        assert find_calls is not None, "no observation brings tools then"
        content, calls = await find_calls(token_ids, number, tools)
        return Written(text, token_ids, calls, decode([], before) + content)


def shared_with(rollout: Rollout, read: list[int]) -> tuple[Fork, int]:
    """Returns where tokens that follow the prompt leave what is recorded, and how many come
    before."""
    token_ids = rollout.token_ids
    following = defaultdict[int, list[int]](list)  # place behind a token: where others follow it
    for fork in rollout.forks:
        following[fork.after].append(fork.start)
    begins = {fork.start for fork in rollout.forks}
    most = after = 0
    # Each token is looked at once, however many branches read it: an agent may have hundreds.
    reached = [(0, 0)]
    while reached:
        common, end = reached.pop()
        if common > most:
            most, after = common, end
        nexts = following.get(end, [])
        if end not in begins:
            nexts = [*nexts, end]
        for place in nexts:
            if place < len(token_ids) and read[common : common + 1] == [token_ids[place]]:
                reached.append((common + 1, place + 1))
    return Fork(len(token_ids), after), most


async def _play(episodes: Sequence[Episode]) -> None:
    """Begins episodes, and plays them to their ends."""
    await together(episode.begin() for episode in episodes)
    alike: dict[tuple[int, ...], list[Episode]] = {}
    for episode in episodes:
        alike.setdefault(tuple(episode.rollout.token_ids), []).append(episode)
    await together(map(_play_alike, alike.values()))


async def _play_alike(episodes: list[Episode]) -> None:
    """Writes the next turns of episodes with the same tokens, mostly none, with one request; plays
    each on as soon as its own turn is whole."""
    open_turns = [episode.rollout.open_turn for episode in episodes]
    turns = [turn for turn in open_turns if turn is not None and not turn.finished]
    whole = {id(turn): asyncio.Event() for turn in turns}
    home = episodes[0].home

    def ended() -> None:
        for turn in turns:
            if turn.finished:
                whole[id(turn)].set()

    async def write() -> None:
        if turns:
            await episodes[0].write_turns(turns, ended)
        ended()

    async def play(episode: Episode) -> None:
        if (event := whole.get(id(episode.rollout.open_turn))) is not None:
            await event.wait()
            episode.home = Home(home.generator)
        await episode.play()

    await together([write(), *map(play, episodes)])
