"""A model of an environment for the real loop of an episode (`lrl.rollouts.episode`).

The model has no words, so tokens carry what it has to know. A token of an observation is the
number of tokens of the turn after it; one of the policy says when its generator wrote it
(`ModelGenerator.mark`), which tells whether that generator still has the episode in its prefix
cache.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lrl.environments import Written
from lrl.environments.play import Reply
from lrl.planning.simulator import run_lengths
from lrl.planning.simulator.length_sampling import LengthSampler
from lrl.rollouts.episode import Episodes, EpisodeTerms
from lrl.types import Prompt, Rollout, Sampling

APART = 2**40
"""Between the keys of draws that are independent."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a simulated environment to a turn before the last one."""

    observation_tokens: int
    """At least 1."""
    next_turn: int
    """Tokens of the turn after it."""


class EpisodeShapes(ABC):
    """Draws the turns of a run's episodes behind their first ones."""

    tool_ms: LengthSampler | None = None
    """Milliseconds of each answer, the last one included; None for none."""

    @abstractmethod
    def of(self, prompt: int, number: int, lengths: LengthSampler) -> Sequence[Answer]:
        """Returns the answers of an episode: one less than it has turns.

        Args:
            prompt: `Prompt.id`.
            number: Of the episode in the run.
            lengths: Of turns.
        """


@dataclass(frozen=True)
class DrawnEpisodes(EpisodeShapes):
    """Episodes with drawn numbers of turns.

    Args:
        turns: Turns of an episode.
        observation_tokens: Tokens of each observation, at least 1.
        tool_ms: Milliseconds of each answer.

    Raises:
        ValueError: `observation_tokens` is below 1.
    """

    turns: LengthSampler
    observation_tokens: int
    tool_ms: LengthSampler | None = None

    def __post_init__(self) -> None:
        if self.observation_tokens < 1:
            raise ValueError(
                f"observation_tokens is {self.observation_tokens}; it must be at least 1."
            )

    def of(self, prompt: int, number: int, lengths: LengthSampler) -> Sequence[Answer]:
        # Another prompt's draw: long turns are not many turns.
        (turns,) = self.turns.of(APART + prompt, number, 1)
        later = lengths.of(prompt, APART + number, turns - 1)
        return [Answer(self.observation_tokens, tokens) for tokens in later]


class ReplayedEpisodes(EpisodeShapes):
    """A run's episodes, in the order in which they began; later ones begin again with the first.

    Args:
        episodes: The answers of each.
        tool_ms: Milliseconds of each answer.
    """

    def __init__(
        self, episodes: Sequence[Sequence[Answer]], tool_ms: LengthSampler | None = None
    ) -> None:
        self.episodes = episodes
        self.tool_ms = tool_ms

    def of(self, prompt: int, number: int, lengths: LengthSampler) -> Sequence[Answer]:
        return self.episodes[number % len(self.episodes)]


class ModelEnvironments:
    """Plays the environment's side of all episodes (`lrl.rollouts.episode.Environments`); any
    number of answers are made at once."""

    deterministic = True

    def __init__(self, shapes: EpisodeShapes, lengths: LengthSampler) -> None:
        self.shapes = shapes
        self.lengths = lengths
        self.counts = Counter[str]()
        self._opened = 0

    def open(self, prompt: Prompt) -> "ModelConversation":
        """Opens an episode. Groups begin in the order of their indices, so the same episode has the
        same number under every dispatch policy."""
        number = self._opened
        self._opened += 1
        answers = self.shapes.of(prompt.id, number, self.lengths)
        waits = [0] * (len(answers) + 1)
        if self.shapes.tool_ms is not None:
            waits = self.shapes.tool_ms.of(2 * APART + prompt.id, number, len(waits))
        return ModelConversation(answers, waits)


class ModelConversation:
    """One episode (`lrl.rollouts.episode.Conversation`)."""

    def __init__(self, answers: Sequence[Answer], waits_ms: Sequence[int]) -> None:
        self._answers = list(answers)
        self._waits_ms = list(waits_ms)

    async def begin(self) -> Reply:
        """See `Conversation.begin`."""
        return Reply()

    async def reply(self, turn: Written) -> Reply:
        """See `Conversation.reply`."""
        await asyncio.sleep(self._waits_ms.pop(0) / 1000)
        if not self._answers:
            return Reply(done=True)
        answer = self._answers.pop(0)
        return Reply([answer.next_turn] * answer.observation_tokens)

    def close(self, why: str = "") -> None:
        """See `Conversation.close`."""


class ModelObservations:
    """The observations of one episode (`lrl.rollouts.episode.Observations`), tokens already."""

    tools: Sequence[dict[str, Any]] = ()

    def ids(self, reply: Reply, turn: Written | None) -> list[int]:
        """See `Observations.ids`."""
        token_ids: Any = reply.observation
        return [] if reply.done else token_ids


class ModelEpisodes(Episodes):
    """The real loop of episodes, with compact rollouts."""

    def __init__(
        self,
        write: Callable[..., Awaitable[None]],
        shapes: EpisodeShapes,
        lengths: LengthSampler,
    ) -> None:
        unlimited = 2**62
        terms = EpisodeTerms(
            max_turns=unlimited,
            max_turn_tokens=unlimited,
            timeout_s=1e12,  # not infinity, at which no loop can set a timer
            stop_tokens=(),
            observations=lambda prompt: ModelObservations(),
            decode=lambda tokens, before: "",
        )
        super().__init__(write, ModelEnvironments(shapes, lengths), terms)

    async def generate(
        self, prompt: Prompt, rollouts: Sequence[Rollout], sampling: Sampling, **how: Any
    ) -> None:
        """See `Episodes.generate`; the rollouts have no token yet."""
        for rollout in rollouts:
            run_lengths.begin(rollout)
        await super().generate(prompt, rollouts, sampling, **how)
