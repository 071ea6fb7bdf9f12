"""Length prediction: expected lengths of responses, learnt from the responses of every step. Only
dispatch and migration read it, so a wrong guess costs time and never changes the training.

A prompt that was answered before is expected to get responses of the same length again; for other
prompts a ranker guesses (`lrl.routing.rankers`). Both numbers are relative to the mean length at
that time: when all responses grow, the lengths of an epoch ago still rank right.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lrl.routing.rankers import NgramRanker, Ranker
from lrl.types import Group, Prompt, Rollout

RECENT_RESPONSES = 4096
"""Responses over which `quantile` is taken."""


class LengthPredictor:
    """Predicts the lengths of responses from earlier ones. One thread learns; another may predict
    meanwhile.

    Args:
        newest_weight: Weight of a prompt's newest responses against the older ones, in (0, 1].
        seen_prompts: The newest prompts, whose lengths are remembered; 12 bytes each in a
            checkpoint.
        ranker: Guesses from the prompt alone; default `lrl.routing.rankers.NgramRanker`.
    """

    def __init__(
        self, newest_weight: float = 0.5, seen_prompts: int = 100_000, ranker: Ranker | None = None
    ) -> None:
        self.newest_weight = newest_weight
        self.seen_prompts = seen_prompts
        self.ranker = ranker or NgramRanker()
        self._level: float | None = None  # moving average of the mean log length of a step
        # Prompt id -> log length less the level, least recently seen first.
        self._seen: dict[int, float] = {}
        self._recent = np.empty(0)  # tokens of single responses, ascending, replaced as a whole
        self._responses = deque[int](maxlen=RECENT_RESPONSES)  # the same in order of arrival

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        """Returns the expected tokens of a whole response, more than `written`: of one that has
        reached its expected length, the mean of all longer ones; before anything was seen, 1
        more."""
        if self._level is None:
            return written + 1.0
        tokens = math.exp(self._log_length(prompt))
        if tokens >= written + 1.0:
            return tokens
        longer = self._recent[np.searchsorted(self._recent, written, side="right") :]
        return float(longer.mean()) if len(longer) else written + 1.0

    def quantile(self, share: float) -> float:
        """Returns the length in tokens that `share` of the recent responses does not exceed; 1
        before the first."""
        recent = self._recent
        return float(recent[math.ceil(share * len(recent)) - 1]) if len(recent) else 1.0

    def end_step(self, groups: Sequence[Group]) -> None:
        """Learns from the responses of a step."""
        groups = [group for group in groups if group.has_tokens]
        if not groups:
            return
        found = [math.log(self._mean_length(group)) for group in groups]
        mean = math.fsum(found) / len(found)
        self._level = mean if self._level is None else self._mixed(self._level, mean)
        for group, log_length in zip(groups, found, strict=True):
            self._note(group.prompt.id, log_length - self._level)
        self.ranker.learn([group.prompt for group in groups], [log - self._level for log in found])
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            self._responses.extend(tokens for tokens, _ in _written(rollout))
        self._recent = np.sort(self._responses)

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Announces prompts that start soon to the ranker. Call it on the thread that calls
        `expected`."""
        self.ranker.look_ahead([prompt for prompt in prompts if prompt.id not in self._seen])

    def _log_length(self, prompt: Prompt) -> float:
        assert self._level is not None, "something was seen"
        known = self._seen.get(prompt.id)
        return self._level + (self.ranker.guess(prompt) if known is None else known)

    def _mean_length(self, group: Group) -> float:
        """Returns the mean tokens of a group's responses; a cut response counts with at least its
        expected length."""
        least = 0.0 if self._level is None else math.exp(self._log_length(group.prompt))
        lengths = [each for rollout in group.rollouts for each in _written(rollout)]
        whole = sum(max(tokens, least) if cut else tokens for tokens, cut in lengths)
        return max(1.0, whole / len(lengths))

    def _note(self, prompt_id: int, relative: float) -> None:
        before = self._seen.pop(prompt_id, None)
        self._seen[prompt_id] = relative if before is None else self._mixed(before, relative)
        if len(self._seen) > self.seen_prompts:
            del self._seen[next(iter(self._seen))]

    def _mixed(self, old: float, new: float) -> float:
        return (1 - self.newest_weight) * old + self.newest_weight * new

    def state_dict(self) -> dict[str, Any]:
        """Returns the state in plain numbers and tensors, of bounded size."""
        return {
            "level": self._level,
            "seen_ids": torch.tensor(list(self._seen), dtype=torch.int64),
            "seen": torch.tensor(list(self._seen.values()), dtype=torch.float32),
            "rankers": {type(self.ranker).__name__: self.ranker.state_dict()},
            "responses": torch.tensor(self._responses, dtype=torch.int32),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._level = state["level"]
        seen = list(zip(state["seen_ids"].tolist(), state["seen"].tolist(), strict=True))
        # The run that saved them may have remembered more.
        self._seen = dict(seen[-self.seen_prompts :])
        # Another class of rankers begins anew.
        if (learnt := state["rankers"].get(type(self.ranker).__name__)) is not None:
            self.ranker.load_state_dict(learnt)
        self._responses = deque(state["responses"].tolist(), maxlen=RECENT_RESPONSES)
        self._recent = np.sort(self._responses)


def _written(rollout: Rollout) -> list[tuple[int, bool]]:
    """Returns the tokens of what each request for a rollout wrote, and whether it was cut: the
    response, or the turns with an environment."""
    *whole, last = [turn.stop - turn.start for turn in rollout.turns] or [0]
    return [*((tokens, False) for tokens in whole), (last, rollout.finish_reason == "length")]
