"""Token counts of a generator, from which its speed is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lrl.types import Rollout


class StatsSnapshot(NamedTuple):
    """A generator's counts at one moment."""

    since: float | None
    """Start of the uninterrupted writing, on the clock of the loop; None when it does not write."""
    written: int
    """Tokens that have come from it so far."""
    up_to_date: bool
    """Whether most of the responses being written have new tokens since the snapshot before: a
    generator sends those of all at once, so few others are on their way."""
    read: int
    """Tokens read so far: prompts, and half-written responses that continued here."""
    responses: int
    """Responses being written."""
    context_tokens: int
    """Sum of their contexts, prompt and response so far."""


@dataclass(eq=False)
class InFlight:
    """A request that a generator writes."""

    prompt_tokens: int
    rollouts: Sequence[Rollout]

    def __post_init__(self) -> None:
        self._had = len(self.rollouts[0].token_ids)  # each of them, at the request

    @property
    def written(self) -> int:
        return sum(len(rollout.token_ids) - self._had for rollout in self.rollouts)

    @property
    def read(self) -> int:
        """A new token of any response shows that the prompt, which they share, was read."""
        return self.prompt_tokens + self._had if self.written else 0

    @property
    def unfinished(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if not rollout.finished]


class GeneratorStats:
    """The counts of one generator, evaluations included."""

    def __init__(self) -> None:
        self.requests: set[InFlight] = set()
        self._since: float | None = None
        # Of the requests that have ended.
        self._written = 0
        self._read = 0
        # Of the responses being written, at the last snapshot, by id.
        self._lengths: dict[int, int] = {}

    @property
    def cached_tokens(self) -> int:
        """Tokens in the KV cache for unfinished responses that have begun, prompts included. It
        lacks those on their way, which a pause sends before it is answered."""
        return sum(
            one.prompt_tokens + len(rollout.token_ids)
            for one in self.requests
            for rollout in one.unfinished
            if rollout.token_ids
        )

    def begin(self, prompt_tokens: int, requests: Sequence[Sequence[Rollout]]) -> list[InFlight]:
        """Adds requests for the responses to one prompt."""
        begun = [InFlight(prompt_tokens, rollouts) for rollouts in requests]
        self.requests.update(begun)
        return begun

    def end(self, requests: Sequence[InFlight]) -> None:
        for one in requests:
            self.requests.remove(one)
            self._written += one.written
            self._read += one.read

    def set_active(self, writes: bool, now: float) -> None:
        """Notes whether the generator writes from `now` on."""
        if not writes:
            self._since = None
        elif self._since is None:
            self._since = now

    def snapshot(self) -> StatsSnapshot:
        before = self._lengths
        lengths = {
            id(rollout): (one.prompt_tokens, len(rollout.token_ids))
            for one in self.requests
            for rollout in one.unfinished
        }
        self._lengths = {name: written for name, (_, written) in lengths.items() if written}
        new = sum(length > before.get(name, 0) for name, length in self._lengths.items())
        return StatsSnapshot(
            since=self._since,
            written=self._written + sum(one.written for one in self.requests),
            up_to_date=0 < len(self._lengths) <= 2 * new,
            read=self._read + sum(one.read for one in self.requests),
            responses=len(lengths),
            context_tokens=sum(map(sum, lengths.values())),
        )
