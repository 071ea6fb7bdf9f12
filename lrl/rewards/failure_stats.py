"""The book on how scoring goes: what failed, of which kind, and whether so much failed that the run has to end.

An error is not a reward. So a run whose reward is broken must not go on with the few answers that got one.
"""

from __future__ import annotations

import logging
from collections import Counter, deque

log = logging.getLogger(__name__)

KINDS = {
    "exception": "Mend the reward.",
    "crash": "Mend the reward, or the library that it uses; if SIGKILL ended the worker, lower data.reward_workers.",
    "timeout": "Mend the reward if it never ends; else raise data.reward_timeout_s, or data.reward_workers.",
    "memory": "Mend the reward, or raise data.reward_memory_gib.",
    "nan": "Mend the reward: it must give a finite number.",
    "wrong_type": "Mend the reward: it must give a float, or a dict of floats.",
    "wrong_shape": "Mend the reward: it must give one number, or a dict with the same parts for every answer.",
}
"""Why an answer has no reward, and what helps. See docs/rewards.md."""

WINDOW = 512
"""Answers over which the share of failures is taken: the last ones."""
FEWEST = 256
"""The share is never of fewer answers than this, so one failure of the first two is not a half."""
_LONGEST_SAMPLE = 80


class RewardFailuresError(ValueError):
    """So many answers got no reward that the run cannot go on."""


class FailureStats:
    """Counts answers, logs the first failure of each kind, and ends the run over a set share of failures.

    Args:
        max_failures: Largest share of the last `WINDOW` answers that may fail, in (0, 1]; 1 allows all.
    """

    def __init__(self, max_failures: float) -> None:
        self.max_failures = max_failures
        self.counts = Counter({name: 0 for name in ("scored", "zero", "gave_up", "retried", *KINDS)})
        self._last: deque[str] = deque(maxlen=WINDOW)  # kind of failure, "" for a reward
        self._samples: dict[str, str] = {}

    def reward(self, value: float) -> None:
        """An answer got a reward."""
        self.counts.update(scored=1, zero=int(value == 0))
        self._last.append("")

    def gave_up(self, prompt_id: int, answer: str, reason: str) -> None:
        """A verifier gave up on an answer, which has its reward.

        Args:
            prompt_id: Of the prompt that it answers.
            answer: Its text.
            reason: The verifier, colon, what was too much.
        """
        self.counts["gave_up"] += 1
        if self.counts["gave_up"] == 1:
            sample = _sample(prompt_id, answer, reason)
            log.info(
                "A verifier gave up on an answer, which is wrong then. %s (Further ones are only counted.)", sample
            )

    def failure(self, prompt_id: int, answer: str, reason: str) -> None:
        """An answer got none.

        Args:
            prompt_id: Of the prompt that it answers.
            answer: Its text.
            reason: Kind, colon, message.
        """
        kind = reason.partition(":")[0]
        self.counts[kind] += 1
        self._last.append(kind)
        if kind in self._samples:
            return
        self._samples[kind] = _sample(prompt_id, answer, reason)
        log.warning("An answer got no reward. %s (Further ones of this kind are only counted.)", self._samples[kind])

    def check(self) -> None:
        """Judge the last answers.

        Raises:
            RewardFailuresError: If too many of them failed.
        """
        kinds = Counter(kind for kind in self._last if kind)
        if kinds.total() <= self.max_failures * max(FEWEST, len(self._last)):
            return
        most = kinds.most_common(1)[0][0]
        by_kind = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        raise RewardFailuresError(
            f"{kinds.total()} of the last {len(self._last)} answers got no reward, also when tried again ({by_kind}); "
            f"data.max_reward_failures is {self.max_failures:g}, a share of {max(FEWEST, len(self._last))} answers. "
            f"{self._samples[most]}. {KINDS[most]} "
            "Or raise data.max_reward_failures, if such answers may be left out; 1 allows any share."
        )


def _sample(prompt_id: int, answer: str, reason: str) -> str:
    start = answer if len(answer) <= _LONGEST_SAMPLE else answer[:_LONGEST_SAMPLE] + "..."
    return f"Prompt {prompt_id}, answer {start!r}: {reason}"
