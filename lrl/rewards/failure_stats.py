"""Counts of scored and failed responses, and the share of failures at which the run ends.

An error is not a reward. A run with a broken reward must not continue with the few responses that
got one.
"""

import logging
from collections import Counter, deque

from lrl.errors import RewardFailuresError

log = logging.getLogger(__name__)

KINDS = {
    "exception": "Fix the reward: a text that it cannot read is worth 0.0, not an exception.",
    "crash": "Fix the reward; if SIGKILL ended its worker, lower data.reward_workers.",
    "timeout": "Fix the reward if it never ends; else raise data.reward_timeout_s.",
    "memory": "Fix the reward, or raise data.reward_memory_gib.",
    "nan": "Fix the reward: it must return a finite number of moderate size.",
    "wrong_type": "Fix the reward: it must return a float, or a dict of floats.",
    "wrong_shape": "Fix the reward: one number, or a dict with the same parts for every response.",
    "judge_refused": "Correct the settings of the judge.",
    "judge_failed": "See that the judge answers; raise Judge.timeout_s and deadline_s if slow.",
    "judge_no_score": "Take another judge: each answer must be the JSON that is asked for.",
    "reward_model_refused": "Correct the settings of the reward model.",
    "reward_model_failed": "See that the server of the reward model answers.",
}
"""Reasons for a response without a reward, each with its remedy. See docs/rewards.md."""
EPISODE_KINDS = {
    "tool_timeout": "Fix the environment if it never answers; else raise data.turn_timeout_s.",
    "environment_error": "Report problems to the policy as an observation, not as an exception.",
    "environment_lost": "See in the log why the processes of the environment end.",
    "episode_timeout": "Raise data.episode_timeout_s, or lower data.max_turns.",
}
"""Reasons for an episode that has failed, each with its remedy. See docs/environments.md."""

WINDOW = 512
"""Number of latest responses over which the share of failures is taken."""
MIN_RESPONSES = 256
"""Smallest number of responses that the share is taken of: one failure of the first two is not a
half."""


class FailureStats:
    """Counts responses, logs the first failure of each kind, and ends the run above a share of
    failures.

    Args:
        max_failures: Largest share of the last `WINDOW` responses that may fail, in (0, 1]; 1
            allows all.
    """

    def __init__(self, max_failures: float) -> None:
        self.max_failures = max_failures
        names = ("scored", "zero", "gave_up", "retried", *KINDS, *EPISODE_KINDS)
        self.counts = Counter(dict.fromkeys(names, 0))
        self._last: deque[str] = deque(maxlen=WINDOW)  # kind of failure, "" for a reward
        self._samples: dict[str, str] = {}

    def reward(self, value: float) -> None:
        """Counts a response with a reward."""
        self.counts["scored"] += 1
        self.counts["zero"] += value == 0
        self._last.append("")

    def gave_up(self, prompt_id: int, response: str, reason: str) -> None:
        """Counts a response that a verifier gave up on, besides `reward`."""
        self._note("gave_up", f"Prompt {prompt_id}, response {response!r:.80}: {reason}")

    def failure(self, prompt_id: int, response: str, reason: str) -> None:
        """Counts a response without a reward; `reason` is `kind: message`."""
        kind = reason.partition(":")[0]
        self._last.append(kind)
        self._note(kind, f"Prompt {prompt_id}, response {response!r:.80}: {reason}")

    def _note(self, kind: str, sample: str) -> None:
        self.counts[kind] += 1
        if kind not in self._samples:
            self._samples[kind] = sample
            what = "A response got no reward."
            if kind == "gave_up":
                what = "A verifier gave up on a response, which is wrong."
            log.warning("%s %s (The next of this kind are only counted.)", what, sample)

    def check(self) -> None:
        """Raises RewardFailuresError if too many of the last responses failed."""
        responses = max(MIN_RESPONSES, len(self._last))
        kinds = Counter(kind for kind in self._last if kind)
        if kinds.total() <= self.max_failures * responses:
            return
        most = kinds.most_common(1)[0][0]
        by_kind = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        raise RewardFailuresError(
            f"{kinds.total()} of the last {len(self._last)} responses got no reward, also when "
            f"tried again ({by_kind}); data.max_reward_failures is {self.max_failures:g}, a share "
            f"of {responses} responses. {self._samples[most]}. {(KINDS | EPISODE_KINDS)[most]} Or "
            "raise data.max_reward_failures, if such responses may be left out; 1 allows any share."
        )
