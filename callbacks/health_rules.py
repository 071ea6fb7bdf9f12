"""Healthy ranges of a run's metrics, and the advice outside of them."""

import math
from dataclasses import dataclass

LAG = "<k>"
"""In the tag of a rule: any lag from 1 up. The metrics of lag 0 are `policy/mismatch_*`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Healthy range of one metric."""

    metric: str
    """Its tag, `<k>` for any lag."""
    advice: str
    """The settings that help, in one short sentence; `{below}` is the lag before the smallest
    unhealthy one."""
    low: float | None = None
    """Smallest healthy value; None is no bound."""
    high: float | None = None
    """Largest one."""

    def allows(self, value: float) -> bool:
        """Tells whether `value` is in the range; NaN is in none."""
        low = -math.inf if self.low is None else self.low
        return low <= value <= (math.inf if self.high is None else self.high)

    @property
    def range(self) -> str:
        """The range in words."""
        if self.low is None:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"


_TOO_FAR = "Lower data.max_lag to {below}, or model.lr."
_SYNC_LESS = "Sync less often: WeightSync.every_n_steps above 1, data.max_lag at least one less."
_COMPARE = "Compare model.dtype with trainer.strategy.server.dtype, and look at model.attention."

RANGES: dict[str, tuple[float | None, float | None]] = {
    "policy/ess": (0.5, None),
    "policy/kl_behaviour": (None, 0.1),
    "policy/clip_fraction": (None, 0.2),
    "policy/mismatch_kl": (None, 0.01),
    "policy/mismatch_max": (None, 2.0),
    "policy/by_lag/<k>/ess": (0.5, None),
    "policy/by_lag/<k>/kl_behaviour": (None, 0.1),
    "reward/std": (0.01, None),
    "rollouts/truncated": (None, 0.25),
    "rollouts/discarded": (None, 0.0),
}
"""Smallest and largest healthy value; docs/metrics.md has the reasons. The other metrics are shares
of the time."""
TIME_SHARE = (None, 0.2)

ADVICE = {
    "policy/ess": "Lower data.max_lag or model.lr.",
    "policy/kl_behaviour": "Lower model.lr or data.max_lag.",
    "policy/clip_fraction": "Lower data.max_lag or model.lr, or widen the clip of model.objective.",
    "policy/mismatch_kl": _COMPARE,
    "policy/mismatch_max": _COMPARE,
    "policy/by_lag/<k>/ess": _TOO_FAR,
    "policy/by_lag/<k>/kl_behaviour": _TOO_FAR,
    "reward/std": (
        "Equal rewards teach nothing: take other prompts, or set data.max_skipped_per_step."
    ),
    "rollouts/truncated": (
        "Raise data.max_response_tokens, or reward brevity (lrl.rewards.LengthPenalty)."
    ),
    "rollouts/discarded": (
        "Responses without a reward: see rewards/* and the first failures in the log."
    ),
    "trainer/wait_first": "Raise data.max_lag if it is 0, or give generation more devices.",
    "trainer/wait_next": "Raise data.max_lag if it is 0, or give generation more devices.",
    "trainer/wait_last": "Raise data.max_lag, or set data.stragglers to mask.",
    "trainer/wait_reward": "Raise data.reward_workers.",
    "trainer/pack": "Raise data.micro_batch_tokens.",
    "trainer/ranks": "Rank 0 waits for slower ranks: give all the same devices.",
    "trainer/stage": _SYNC_LESS,
    "trainer/transfer": _SYNC_LESS,
    "trainer/probe": _SYNC_LESS,
    "generators/paused": _SYNC_LESS,
    "generators/starved": (
        "Raise data.max_lag if the trainer waits too; otherwise fewer generators do."
    ),
    "generators/idle": "Take fewer data.rollouts_per_group, or another data.dispatch.",
}
"""The remedy in one short sentence; docs/metrics.md has the causes."""
RULES = tuple(
    Rule(metric, advice, *RANGES.get(metric, TIME_SHARE)) for metric, advice in ADVICE.items()
)
