"""Token counts of a generator, from which its speed is computed."""

from collections.abc import Sequence
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


class Prefill(NamedTuple):
    """Responses of one request that have no new token yet."""

    prompt_tokens: int
    had: int
    """Tokens of each response at the request."""
    rollouts: Sequence[Rollout]


class GeneratorStats:
    """The counts of one generator, evaluations included."""

    def __init__(self) -> None:
        self._since: float | None = None
        # Id -> tokens of its prompt, and the response.
        self._writing: dict[int, tuple[int, Rollout]] = {}
        self._written = 0  # tokens of responses that left, less what all had when they came
        self._read = 0
        self._unread: dict[int, Prefill] = {}  # by the id of the first response
        # Of the responses being written, at the last snapshot, by id.
        self._lengths: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        return not self._writing

    @property
    def cached_tokens(self) -> int:
        """Tokens in the KV cache for unfinished responses that have begun, prompts included. It
        lacks those on their way, which a pause sends before it is answered."""
        return sum(
            prompt + len(one.token_ids)
            for prompt, one in self._writing.values()
            if one.token_ids and not one.finished
        )

    def begin(self, prompt_tokens: int, requests: Sequence[Sequence[Rollout]]) -> None:
        """Adds the responses to one prompt, by request; those of one share its prefill."""
        for rollouts in requests:
            had = len(rollouts[0].token_ids)
            self._unread[id(rollouts[0])] = Prefill(prompt_tokens, had, rollouts)
            self._writing |= {id(rollout): (prompt_tokens, rollout) for rollout in rollouts}
            self._written -= sum(len(rollout.token_ids) for rollout in rollouts)

    def end(self, rollouts: Sequence[Rollout]) -> None:
        """Removes responses, finished or not."""
        self._count_read([id(rollout) for rollout in rollouts if id(rollout) in self._unread])
        for rollout in rollouts:
            self._unread.pop(id(rollout), None)
            del self._writing[id(rollout)]
            self._written += len(rollout.token_ids)

    def set_active(self, writes: bool, now: float) -> None:
        """Notes whether the generator writes from `now` on."""
        if not writes:
            self._since = None
        elif self._since is None:
            self._since = now

    def snapshot(self) -> StatsSnapshot:
        self._count_read(list(self._unread))
        unfinished = [
            (prompt, rollout) for prompt, rollout in self._writing.values() if not rollout.finished
        ]
        before = self._lengths
        self._lengths = {id(one): len(one.token_ids) for _, one in unfinished if one.token_ids}
        new = sum(length > before.get(name, 0) for name, length in self._lengths.items())
        return StatsSnapshot(
            since=self._since,
            written=self._written
            + sum(len(rollout.token_ids) for _, rollout in self._writing.values()),
            up_to_date=0 < len(self._lengths) <= 2 * new,
            read=self._read,
            responses=len(unfinished),
            context_tokens=sum(prompt + len(rollout.token_ids) for prompt, rollout in unfinished),
        )

    def _count_read(self, keys: list[int]) -> None:
        for key in keys:
            request = self._unread[key]
            # A new token of any response shows that the prompt was read.
            if any(len(rollout.token_ids) > request.had for rollout in request.rollouts):
                self._read += request.prompt_tokens + request.had
                del self._unread[key]
