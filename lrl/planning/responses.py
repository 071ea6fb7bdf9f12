"""Simulated responses: how long they are, the later turns of an episode, and lists of tokens that
take little memory.

Lengths are drawn by a seed as a function of prompt and group: the same under every dispatch policy.
Responses to one prompt are alike, for length is largely a matter of the prompt's difficulty
(StreamRL, 2504.15930, ranks prompts by it). So the normal number behind a length is a sum of two,
one of the prompt and one of the response.

A simulated episode has no words, so its tokens say what has to be known. A token of an observation
is the number of tokens of the turn after it; one of the policy says when its generator wrote it
(`ModelGenerator.mark`), and so whether that generator's prefix cache still has the episode.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

import numpy as np

from lrl.environments import Written
from lrl.environments.play import Reply
from lrl.rollouts.episodes.episode import Episodes
from lrl.types import Prompt, Rollout, Sampling

V = TypeVar("V", int, float)
UNLIMITED = 2**62
"""Tokens, turns and prompts that nothing limits."""
APART = 2**40
"""Between the keys of draws that are independent."""


class RunLengths(Sequence[V]):
    """A run-length encoded list: (value, how often in a row), in order. It grows by `+=`, as a list
    does, whose 20,000 versions would take 160 kB."""

    __slots__ = ("runs", "_length")

    def __init__(self, runs: Iterable[tuple[V, int]] = ()) -> None:
        self.runs: list[tuple[V, int]] = [(value, count) for value, count in runs if count]
        self._length: int = sum(count for _, count in self.runs)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[V]:
        return (value for value, count in self.runs for _ in range(count))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        place = range(self._length)[index]
        for value, count in self.runs:
            if place < count:
                return value
            place -= count
        raise IndexError(index)

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, RunLengths):
            other = RunLengths((value, len(list(equal))) for value, equal in groupby(other))
        return RunLengths(chain(self.runs, other.runs))

    def count(self, value: Any) -> int:
        return sum(count for one, count in self.runs if one == value)


def fill(rollout: Rollout, versions: Sequence[tuple[int, int]], token: int = 0) -> None:
    """Finishes an empty rollout of equal tokens, with `versions`: (version, tokens) in order."""
    written: Any = RunLengths(versions)
    rollout.token_ids = RunLengths([(token, len(written))])  # type: ignore[assignment]
    rollout.versions = written
    rollout.logprobs = RunLengths([(0.0, len(written))])  # type: ignore[assignment]
    rollout.finish_reason = "stop"


@dataclass(kw_only=True)
class LengthSampler(ABC):
    """A distribution of lengths in tokens, also a dispatch policy's `ExpectedLengths`."""

    prompt_share: float = 0.5
    """Share of the variance between prompts, in [0, 1]: at 1 a prompt's responses are equally long."""
    seed: int = 0

    @abstractmethod
    def tokens(self, normal: np.ndarray) -> np.ndarray:
        """Maps standard normal numbers, float64 [n], to tokens, int64 [n], at least 1."""

    def of(self, prompt: int, index: int, responses: int) -> list[int]:
        """Returns the tokens of each response of a group: `prompt` is `Prompt.id`, and `index` is
        `Group.index`, as another epoch has other responses to the same prompt."""
        of_responses = np.random.default_rng([self.seed, 1, index]).standard_normal(responses)
        normal = self._of_prompt(prompt) + math.sqrt(1 - self.prompt_share) * of_responses
        return self.tokens(normal).tolist()

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        """Returns the median tokens of the prompt's responses; more than `written`."""
        return max(float(self.tokens(np.array([self._of_prompt(prompt.id)]))[0]), written + 1.0)

    def quantile(self, share: float) -> float:
        """Returns the tokens that this share of all responses does not exceed."""
        return float(self.tokens(np.array([NormalDist().inv_cdf(share)]))[0])

    def _of_prompt(self, prompt: int) -> float:
        normal = np.random.default_rng([self.seed, 0, prompt]).standard_normal()
        return math.sqrt(self.prompt_share) * normal


@dataclass
class Lognormal(LengthSampler):
    """exp of a normal number (mean log(`median`), deviation `sigma`), cut at `longest`."""

    median: float
    sigma: float
    longest: int

    def tokens(self, normal: np.ndarray) -> np.ndarray:
        return (self.median * np.exp(self.sigma * normal)).clip(1, self.longest).astype(np.int64)


class ObservedLengths(LengthSampler):
    """Observed lengths, each at least 1, all equally likely."""

    def __init__(self, lengths: Sequence[float], **how: Any) -> None:
        super().__init__(**how)
        self._sorted = np.sort(np.round(lengths).astype(np.int64))

    def tokens(self, normal: np.ndarray) -> np.ndarray:
        shares = np.array([NormalDist().cdf(one) for one in normal])
        ranks = (shares * len(self._sorted)).astype(np.int64)
        return self._sorted[ranks.clip(max=len(self._sorted) - 1)]


class ReplayedLengths(ObservedLengths):
    """A run's lengths, group by group in order; later groups draw from all of them."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        super().__init__([length for group in groups for length in group])
        self._groups = groups

    def of(self, prompt: int, index: int, responses: int) -> list[int]:
        if index < len(self._groups) and len(self._groups[index]) == responses:
            return list(self._groups[index])
        return super().of(prompt, index, responses)


class Answer(NamedTuple):
    """The answer of a simulated environment to a turn before the last one."""

    observation_tokens: int
    """At least 1."""
    next_turn: int
    """Tokens of the turn after it."""


@dataclass(frozen=True)
class DrawnEpisodes:
    """Episodes with drawn numbers of turns, and observations of at least one token each."""

    turns: LengthSampler
    observation_tokens: int
    tool_ms: LengthSampler | None = None
    """Milliseconds of each answer, the last one included; None for none."""

    def of(self, prompt: int, number: int, lengths: LengthSampler) -> Sequence[Answer]:
        """Returns the answers of episode `number`, one less than it has turns of these lengths."""
        # Another prompt's draw: long turns are not many turns.
        (turns,) = self.turns.of(APART + prompt, number, 1)
        later = lengths.of(prompt, APART + number, turns - 1)
        return [Answer(self.observation_tokens, tokens) for tokens in later]


@dataclass(frozen=True)
class ReplayedEpisodes:
    """The answers of a run's episodes, in the order of their beginnings, over and over."""

    episodes: Sequence[Sequence[Answer]]
    tool_ms: LengthSampler | None = None

    def of(self, prompt: int, number: int, lengths: LengthSampler) -> Sequence[Answer]:
        return self.episodes[number % len(self.episodes)]


EpisodeShapes = DrawnEpisodes | ReplayedEpisodes
"""The turns of a run's episodes behind their first ones."""


@dataclass
class ModelEnvironments:
    """The environment's side of all episodes (`lrl.rollouts.episodes.episode.Environments`), whose
    observations are tokens already (`Observations`); any number of answers are made at once."""

    shapes: EpisodeShapes
    lengths: LengthSampler
    counts: Counter[str] = field(default_factory=Counter)
    deterministic = True
    tools: Sequence[dict[str, Any]] = ()
    _opened: int = 0

    def open(self, prompt: Prompt) -> ModelConversation:
        # Groups begin in the order of their indices, so the same episode has the same number under
        # every dispatch policy.
        number = self._opened
        self._opened += 1
        answers = list(self.shapes.of(prompt.id, number, self.lengths))
        waits = [0] * (len(answers) + 1)
        if self.shapes.tool_ms is not None:
            waits = self.shapes.tool_ms.of(2 * APART + prompt.id, number, len(waits))
        return ModelConversation(answers, waits)

    def ids(self, reply: Reply, turn: Written | None) -> list[int]:
        token_ids: Any = reply.observation
        return [] if reply.done else token_ids


@dataclass
class ModelConversation:
    """One episode (`lrl.rollouts.episodes.episode.Conversation`)."""

    answers: list[Answer]
    waits_ms: list[int]

    async def begin(self) -> Reply:
        return Reply()

    async def reply(self, turn: Written) -> Reply:
        await asyncio.sleep(self.waits_ms.pop(0) / 1000)
        if not self.answers:
            return Reply(done=True)
        answer = self.answers.pop(0)
        return Reply([answer.next_turn] * answer.observation_tokens)

    def close(self, why: str = "") -> None:
        pass


class ModelEpisodes(Episodes):
    """The real loop of episodes, with compact rollouts."""

    def __init__(
        self, write: Callable[..., Awaitable[None]], shapes: EpisodeShapes, lengths: LengthSampler
    ) -> None:
        environments = ModelEnvironments(shapes, lengths)
        super().__init__(
            write=write,
            environments=environments,
            max_turns=UNLIMITED,
            max_turn_tokens=UNLIMITED,
            timeout_s=1e12,  # not infinity, at which no loop can set a timer
            stop_tokens=(),
            observations=lambda prompt: environments,
            decode=lambda tokens, before: "",
        )

    async def generate(
        self, prompt: Prompt, rollouts: Sequence[Rollout], sampling: Sampling, **how: Any
    ) -> None:
        for rollout in rollouts:
            for name in ("token_ids", "logprobs", "versions"):
                setattr(rollout, name, RunLengths())
        await super().generate(prompt, rollouts, sampling, **how)
